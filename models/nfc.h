// Unicode normalisation form C, in linear time, with the tables the reference tokenizer uses.
#pragma once

#include <string>
#include <string_view>

namespace quern {

/// True when `text` is NFC for sure because all of it is below U+0300; false says nothing.
bool is_trivially_nfc(std::string_view text);

/// NFC of valid UTF-8. Data from utf8proc, narrowed to Unicode 9: Hugging Face tokenizers (through 0.23)
/// normalise with Unicode 9 tables, where younger combining marks do not reorder and younger composites do
/// not (de)compose. Models were trained on text split that way, and the result does not depend on the
/// installed utf8proc. O(n log n) at worst, also for a million combining marks on one letter.
std::string to_nfc(std::string_view text);

}  // namespace quern
