// Input: people's text from files and standard input, bounded and UTF-8.
#pragma once

#include <cstdint>
#include <string>

namespace quern {

constexpr int64_t kLongestInput = 64 << 20;  // bytes; far more than any context holds

/// The whole text of a file, FIFO or device; a byte order mark at the start is dropped. Throws Error(usage): not there,
/// not readable, a directory, longer than `limit`, or not UTF-8 (with the offset).
std::string read_input_file(const std::string& path, int64_t limit = kLongestInput);

/// The same for standard input. If that is closed: empty.
std::string read_standard_input(int64_t limit = kLongestInput);

/// Prompt, blank line, text. Either may be empty.
std::string join_prompt(const std::string& prompt, const std::string& text);

}  // namespace quern
