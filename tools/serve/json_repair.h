// Text that clients mean as JSON and that is not quite.
#pragma once

#include <string>
#include <string_view>

namespace quern {

/// The same text, but for escaped halves of surrogate pairs without their other half (\ud83d, of an emoji that was cut in
/// two) and bytes that are not UTF-8: each becomes U+FFFD. Linear time.
std::string repaired_json(std::string_view text);

}  // namespace quern
