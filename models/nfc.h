// Unicode normalisation form C, in linear time, with the tables the reference tokenizer uses.
#pragma once

#include <string>
#include <string_view>

namespace quern {

/// True: all of `text` is below U+0300, so it is NFC. False: unknown.
bool is_trivially_nfc(std::string_view text);

/// NFC of valid UTF-8. Data from utf8proc, narrowed to Unicode 9, whatever utf8proc is installed: Hugging Face
/// tokenizers (through 0.23) normalise with Unicode 9 tables, where younger combining marks do not reorder and
/// younger composites do not (de)compose, and models were trained on text split that way. O(n log n) at worst,
/// even for a million combining marks on one letter.
std::string to_nfc(std::string_view text);

}  // namespace quern
