#include "tools/run/completion.h"

#include <algorithm>
#include <filesystem>

#include "tools/run/transcript.h"

namespace quern {
namespace {

namespace fs = std::filesystem;

void add_matches(const std::vector<std::string>& all, std::string_view word, std::vector<std::string>& out) {
    for (const std::string& one : all)
        if (one.starts_with(word)) out.push_back(one);
}

/// Hidden files only if the name begins with a dot.
void add_files(const std::string& word, std::vector<std::string>& out) {
    const size_t slash = word.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : word.substr(0, slash + 1),
                      name = word.substr(folder.size());
    const std::string place = folder.empty() ? "." : folder;
    std::error_code error;
    for (fs::directory_iterator at(place, error), end; !error && at != end; at.increment(error)) {
        const std::string found = at->path().filename().string();
        if (!found.starts_with(name) || (found[0] == '.' && name.empty())) continue;
        std::error_code ignored;
        out.push_back(folder + found + (at->is_directory(ignored) ? "/" : ""));
    }
}

}  // namespace

Completion complete_line(std::string_view line, const std::vector<std::string>& commands) {
    Completion out;
    if (!line.starts_with('/') || line.starts_with("//")) return out;
    const size_t blank = line.find(' ');
    if (blank == std::string_view::npos) {
        add_matches(commands, line, out.words);
    } else {
        const std::string_view command = line.substr(0, blank);
        out.from = line.find_first_not_of(' ', blank);
        if (out.from == std::string_view::npos) out.from = line.size();
        const std::string word(line.substr(out.from));
        const bool kept = command == "/load" || command == "/save";
        if (kept) add_matches(list_transcripts(), word, out.words);
        if (command == "/read" || (kept && word.find('/') != std::string::npos)) add_files(word, out.words);
    }
    std::sort(out.words.begin(), out.words.end());
    return out;
}

std::string common_prefix(const std::vector<std::string>& words) {
    if (words.empty()) return "";
    std::string common = words[0];
    for (const std::string& word : words) {
        const auto end = std::mismatch(common.begin(), common.end(), word.begin(), word.end()).first;
        common.erase(end, common.end());
    }
    return common;
}

}  // namespace quern
