// UTF-8 as bytes arrive: where one character ends, and what to put where bytes are not UTF-8.
//
// Invalid bytes become one U+FFFD per maximal subpart (Unicode 3.9, "best practice"), as in Rust's from_utf8_lossy,
// Python's errors="replace" and browsers. Surrogates and overlong forms are invalid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace quern {

inline constexpr std::string_view kReplacementCharacter = "\xef\xbf\xbd";

/// One step of a scan: a whole character, or a maximal subpart of an invalid one.
struct Utf8Unit {
    uint32_t code_point;  // only when valid
    uint8_t length;       // bytes, 1..4
    bool valid;
    bool cut;  // invalid only because the text ends inside the character
};

/// The unit that starts at text[at]; `at` must be inside the text.
Utf8Unit utf8_unit(std::string_view text, size_t at);

/// Appends `text`, invalid bytes replaced by U+FFFD.
void append_utf8_lossy(std::string& out, std::string_view text);

bool is_valid_utf8(std::string_view text);

/// Bytes at the end of `text` (0..3) that begin a character which more bytes could complete.
size_t utf8_cut_tail(std::string_view text);

void append_utf8(std::string& out, uint32_t code_point);

}  // namespace quern
