#include "tools/run/markdown_style.h"

#include <algorithm>

namespace quern {
namespace {

constexpr const char* kNone = "\033[0m";
constexpr size_t kLongestIndent = 12;

/// "```", "~~~~" ...: a fence's characters; empty: none.
std::string fence_of(std::string_view line) {
    if (line.empty() || (line[0] != '`' && line[0] != '~')) return {};
    const size_t end = std::min(line.find_first_not_of(line[0]), line.size());
    return end >= 3 ? std::string(line.substr(0, end)) : std::string();
}

bool is_all(std::string_view text, char c) { return text.find_first_not_of(c) == std::string_view::npos; }

/// Whether more characters may change what kind of line this is.
bool is_open(std::string_view text) {
    if (text.empty()) return true;
    if (text[0] == '#') return text.size() <= 6 && is_all(text, '#');
    return (text[0] == '`' || text[0] == '~') && text.size() < 3 && is_all(text, text[0]);
}

}  // namespace

std::string MarkdownStyle::push(std::string_view text) {
    std::string out;
    for (const char c : text) {
        if (!at_start_) {
            in_line(c, out);
            continue;
        }
        start_ += c;
        begin_line(out, c == '\n');
    }
    return out;
}

/// Decides what kind of line this is, once its first characters say so, and writes them.
void MarkdownStyle::begin_line(std::string& out, bool at_end) {
    const size_t indent = std::min(start_.find_first_not_of(' '), start_.size());
    const std::string_view text = std::string_view(start_).substr(indent);
    if (!at_end && indent < kLongestIndent && is_open(text)) return;
    const std::string fence = fence_of(text);
    if (!fence_.empty()) {
        if (fence.starts_with(fence_)) {
            fence_.clear();
            dim_ = true;
        }
    } else if (!fence.empty()) {
        fence_ = fence;
        dim_ = true;
    } else if (text[0] == '#') {
        heading_ = text.find(' ') != std::string_view::npos;
    } else if (text[0] == '>') {
        dim_ = true;
    }
    at_start_ = false;
    const std::string held = std::move(start_);
    start_.clear();
    set(out);
    for (const char c : held) in_line(c, out);
}

void MarkdownStyle::in_line(char c, std::string& out) {
    if (c == '\n') return end_line(out);
    if (fence_.empty() && !dim_ && !heading_) {
        if (c == '*' && !code_) {
            ++stars_;
            return;
        }
        end_stars(c, out);
        if (c == '`' && !code_) {
            code_ = true;
            set(out);
        } else if (c == '`') {
            out += c;
            before_ = c;
            code_ = false;
            return set(out);
        }
    }
    out += c;
    before_ = c;
}

void MarkdownStyle::end_stars(char next, std::string& out) {
    if (stars_ == 0) return;
    const std::string held(static_cast<size_t>(stars_), '*');
    const bool blank_before = before_ == ' ' || before_ == '\n', blank_after = next == ' ' || next == '\n';
    const bool pair = stars_ >= 2 && (strong_ ? !blank_before : !blank_after);
    stars_ = 0;
    if (pair && !strong_) {
        strong_ = true;
        set(out);
        out += held;
    } else {
        out += held;
        if (pair) {
            strong_ = false;
            set(out);
        }
    }
    before_ = '*';
}

void MarkdownStyle::end_line(std::string& out) {
    end_stars('\n', out);
    heading_ = dim_ = strong_ = code_ = false;
    at_start_ = true;
    set(out);
    out += '\n';
    before_ = '\n';
}

void MarkdownStyle::set(std::string& out) {
    std::string wanted;
    if (heading_ || strong_) wanted += "\033[1m";
    if (dim_) wanted += "\033[2m";
    if (code_ || (!fence_.empty() && !dim_ && !at_start_)) wanted += "\033[36m";
    if (wanted == colors_) return;
    if (!colors_.empty()) out += kNone;
    out += wanted;
    colors_ = wanted;
}

std::string MarkdownStyle::finish() {
    std::string out;
    if (at_start_ && !start_.empty()) begin_line(out, true);
    end_stars('\n', out);
    if (!colors_.empty()) out += kNone;
    *this = {};
    return out;
}

}  // namespace quern
