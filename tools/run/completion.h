// What Tab offers: commands of the chat, kept chats, files.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace quern {

struct Completion {
    size_t from = 0;                 // bytes of the line before the word that is completed
    std::vector<std::string> words;  // sorted; a directory ends with a slash
};

/// `line`: up to the cursor. `commands`: with their slash. Nothing for ordinary text.
Completion complete_line(std::string_view line, const std::vector<std::string>& commands);

/// What all words begin with.
std::string common_prefix(const std::vector<std::string>& words);

}  // namespace quern
