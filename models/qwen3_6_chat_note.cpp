// Whether a checkpoint's own chat template says what the native format says.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "ggml-like/error.h"
#include "ggml-like/json_guard.h"
#include "models/qwen3_6_chat.h"

namespace quern {
namespace {

constexpr uintmax_t kMaxFile = 64 << 20;  // templates are some 8 KB; the tokenizer's config is below 1 MB

/// Empty if there is no such file, or it is not a plain file of sensible size.
std::string read_small_file(const std::filesystem::path& path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) return {};
    if (std::filesystem::file_size(path, error) > kMaxFile || error) return {};
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
}

/// chat_template of tokenizer_config.json: a string, or a list of templates with names.
std::string template_in_config(const std::filesystem::path& path) {
    const std::string text = read_small_file(path);
    if (text.empty()) return {};
    const nlohmann::json config = parse_json(text, path.filename().string());
    const auto it = config.is_object() ? config.find("chat_template") : config.end();
    if (!config.is_object() || it == config.end()) return {};
    if (it->is_string()) return it->get<std::string>();
    if (!it->is_array()) return {};
    for (const nlohmann::json& entry : *it)
        if (entry.is_object() && entry.contains("name") && entry["name"] == "default" &&
            entry.contains("template") && entry["template"].is_string())
            return entry["template"].get<std::string>();
    return {};
}

/// What every template of the family says in so many words, and what is missing if it does not. Line feeds
/// stand in string literals of the template language, hence as a backslash and n.
constexpr std::pair<std::string_view, std::string_view> kFeatures[] = {
    {"<|im_start|>", "turns do not begin with <|im_start|>"},
    {"<|im_end|>", "turns do not end with <|im_end|>"},
    {"</think>", "there is no thinking"},
    {"enable_thinking", "thinking cannot be switched"},
    {"reasoning_content", "messages have no reasoning_content"},
    {R"(<tool_call>\n<function=)", "tool calls are written differently"},
    {"<parameter=", "tool calls are written differently"},
    {"<tool_response>", "tool results are written differently"},
    {"You have access to the following functions:", "tools are introduced differently"},
    {"ONLY reply in the following format with NO suffix:", "tools are introduced differently"},
    {"<IMPORTANT>", "tools are introduced differently"},
};

/// Signs of an edited template, or of a sister family.
constexpr std::pair<std::string_view, std::string_view> kForeign[] = {
    {"enable_thinking is true", "it thinks only on request"},
    {"You are ", "it has a system prompt of its own"},
    {"/no_think", "it has switches in the text"},
    {"strftime_now", "it writes the date"},
    {"builtin_tools", "it has tools of its own"},
};

std::string_view difference(std::string_view text) {
    for (const auto& [feature, reason] : kFeatures)
        if (text.find(feature) == text.npos) return reason;
    for (const auto& [feature, reason] : kForeign)
        if (text.find(feature) != text.npos) return reason;
    return {};
}

std::string note(const std::string& directory) {
    const std::filesystem::path root(directory);
    std::string name = "chat_template.jinja";
    std::string text = read_small_file(root / name);
    if (text.empty()) {
        name = "the chat template in tokenizer_config.json";
        text = template_in_config(root / "tokenizer_config.json");
    }
    if (text.empty()) return {};
    const std::string_view reason = difference(text);
    if (reason.empty()) return {};
    return name + " is not one quern knows (" + std::string(reason) +
           "); quern's own Qwen3.6 chat format is used instead";
}

}  // namespace

std::string qwen3_6_template_note(const std::string& directory) {
    try {
        return note(directory);
    } catch (const std::exception& error) {
        // Whoever needs the tokenizer's config reports it in full.
        return std::string("the chat template cannot be read: ") + error.what();
    }
}

}  // namespace quern
