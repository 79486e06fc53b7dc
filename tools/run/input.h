// Input: text that people give, from files and standard input: bounded, and UTF-8.
#pragma once

#include <cstdint>
#include <string>

namespace quern {

constexpr int64_t kLongestInput = 64 << 20;  // bytes; far more than any context holds

/// Whole text of a file, or of a FIFO or device up to the limit; a byte order mark at the start is dropped.
/// Throws Error(usage): not there, not readable, a directory, too long, or not UTF-8 (with the offset).
std::string read_input_file(const std::string& path, int64_t limit = kLongestInput);

/// The same for standard input, to its end. A closed one is empty.
std::string read_standard_input(int64_t limit = kLongestInput);

/// Prompt and text that go together: prompt, blank line, text. Either may be empty.
std::string join_prompt(const std::string& prompt, const std::string& text);

}  // namespace quern
