// Cells and graphemes: how wide text is on a terminal, and where what a person sees as one character begins and ends.
#pragma once

#include <cstddef>
#include <string_view>

namespace quern {

/// Columns of the terminal at `fd`; 0: it is none, or does not say.
int terminal_columns(int fd);

/// Cells of UTF-8 text on one line. Escape sequences that set colours (CSI ... m) have none.
int text_width(std::string_view text);

/// Borders of grapheme clusters (Unicode UAX #29): the first after `at`, the last before it. Characters are code points.
size_t next_grapheme(std::wstring_view text, size_t at);
size_t previous_grapheme(std::wstring_view text, size_t at);

}  // namespace quern
