#include "models/module_list.h"

#include <cctype>
#include <optional>

#include "ggml-like/json.h"
#include "models/tensor_names.h"

namespace quern {
namespace {

/// The wildcard that matches what this Python expression does at the start of a name.
std::optional<std::string> wildcard_of(std::string_view regex) {
    std::string out;
    if (regex.starts_with('^')) regex.remove_prefix(1);
    const bool to_end = regex.ends_with('$');
    if (to_end) regex.remove_suffix(1);
    for (size_t i = 0; i < regex.size(); ++i) {
        const char c = regex[i], next = i + 1 < regex.size() ? regex[i + 1] : '\0';
        if (c == '\\' && next == '.') {
            out += '.';
            ++i;
        } else if (c == '[' && i + 2 < regex.size() && regex[i + 2] == ']' && next != '^' && next != '\\') {
            out += next;  // a class of one character, mostly "[.]"
            i += 2;
        } else if (c == '.' && next == '*') {
            out += '*';
            ++i;
        } else if (c == '.') {
            out += '?';
        } else if (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-') {
            out += c;
        } else {
            return std::nullopt;
        }
        const char after = i + 1 < regex.size() ? regex[i + 1] : '\0';
        if (after == '+' || after == '{') return std::nullopt;
    }
    return to_end ? out : out + '*';
}

std::string official_module(const std::string& name) {
    std::string with_end = canonical_name(name + ".weight");
    with_end.resize(with_end.size() - 7);
    return with_end;
}

}  // namespace

bool matches_wildcard(std::string_view pattern, std::string_view text) {
    size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
    while (t < text.size()) {
        if (p < pattern.size() && pattern[p] == '*') {
            star = p++;
            resume = t;
        } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
            ++p;
            ++t;
        } else if (star != std::string_view::npos) {
            p = star + 1;
            t = ++resume;
        } else {
            return false;
        }
    }
    while (p < pattern.size() && pattern[p] == '*') ++p;
    return p == pattern.size();
}

void ModuleList::add_exact(const std::string& name) {
    exact_.insert(name);
    exact_.insert(official_module(name));
}

void ModuleList::add(const nlohmann::json& list, Syntax syntax) {
    if (!list.is_array()) return;
    if (syntax == Syntax::glob) below_ = true;
    for (const nlohmann::json& entry : list) {
        if (!entry.is_string()) continue;
        const auto& text = entry.get_ref<const std::string&>();
        if (syntax == Syntax::glob && text.find_first_of("*?[") != std::string::npos) {
            if (text.find('[') == std::string::npos)
                wildcards_.push_back(text);
            else
                ++unread_;
        } else if (text.starts_with("re:")) {
            if (auto wildcard = wildcard_of(std::string_view(text).substr(3)))
                wildcards_.push_back(std::move(*wildcard));
            else
                ++unread_;
        } else {
            add_exact(text);
        }
    }
}

bool ModuleList::contains(std::string_view official, std::string_view in_file) const {
    for (std::string_view name : {official, in_file}) {
        if (exact_.contains(name)) return true;
        for (size_t dot = name.rfind('.'); below_ && dot != std::string_view::npos; dot = name.rfind('.')) {
            name = name.substr(0, dot);
            if (exact_.contains(name)) return true;
        }
    }
    for (const std::string& wildcard : wildcards_)
        if (matches_wildcard(wildcard, official) || matches_wildcard(wildcard, in_file)) return true;
    return false;
}

}  // namespace quern
