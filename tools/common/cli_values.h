// Values of command line flags and of settings typed at the prompt: strict numbers, and suggestions for typos.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

/// A whole number with an optional suffix: k = 1000, M = 1000000, Ki = 1024, Mi = 1048576. Empty for anything else:
/// text, fractions, overflow, blanks.
std::optional<int64_t> integer_of(std::string_view text);
/// The same in [min, max]. `what` names it in the message. Throws Error(usage).
int64_t parse_integer(std::string_view text, const std::string& what,
                      int64_t min = std::numeric_limits<int64_t>::min(),
                      int64_t max = std::numeric_limits<int64_t>::max());

/// A finite decimal number; the decimal point is a dot in every locale. Empty for anything else.
std::optional<double> number_of(std::string_view text);
/// The same in [min, max]. Throws Error(usage).
double parse_number(std::string_view text, const std::string& what, double min, double max);

/// on/off, true/false, yes/no, 1/0. Throws Error(usage).
bool parse_switch(std::string_view text, const std::string& what);

/// The candidate with the fewest edits (insert, delete, replace, swap of neighbours) from `word`; empty if none is
/// close. Leading dashes do not count. Long words match nothing.
std::string nearest_match(std::string_view word, const std::vector<std::string>& candidates);

/// ", did you mean 'x'?" or nothing.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

/// Text of unknown origin for a message: shortened, control characters and bad UTF-8 replaced.
std::string printable(std::string_view text, size_t max_bytes = 80);
/// The same for several lines: those after the first are indented, so that no line that comes from a file looks like
/// one of the program's.
std::string printable_lines(std::string_view text, size_t max_bytes);

/// Well-formed UTF-8 (RFC 3629). On failure `bad_offset` is where the first bad sequence begins.
bool is_utf8(std::string_view text, size_t* bad_offset = nullptr);

}  // namespace quern
