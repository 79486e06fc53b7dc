// Which official format a checkpoint's own chat template is, or was made from, and what differs from that.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/json.h"
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

/// Templates that the formats render exactly: Qwen's own, one for each version, and the demo's.
struct Official {
    size_t length;  // without a line feed at the end, which rendering drops
    uint64_t hash;  // ContentHash of so much
    const ChatFormat* format;
};
constexpr Official kOfficial[] = {
    {7756, 0x77b4ca9054e37502, &kQwen35Chat},
    {7764, 0x4d278e069527dacc, &kQwen36Chat},
    {8952, 0xbc47c1c2dc79e071, &kQwen38Chat},
    {6750, 0xc9abe88bad45bfd9, &kQwen36Chat},  // models/demo
};

/// The format that this text renders exactly; null if there is none.
const ChatFormat* official(std::string_view text) {
    if (text.ends_with('\n')) text.remove_suffix(1);
    ContentHash hash;
    hash.add(text);
    for (const Official& known : kOfficial)
        if (known.length == text.size() && known.hash == hash.value()) return known.format;
    return nullptr;
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// The version that an edited template was made from.
const ChatFormat* nearest(std::string_view text) {
    if (has(text, "Reasoning effort is set to")) return &kQwen38Chat;
    return has(text, "enable_thinking") && !has(text, "preserve_thinking") ? &kQwen35Chat : &kQwen36Chat;
}

/// Edits that many checkpoints carry.
struct CommunityEdit {
    std::string_view sign, name;
};
constexpr CommunityEdit kCommunity[] = {
    {"<|think_off|>", "froggeric's edit, with switches for thinking in the text"},
    {"ns.last_query_index and reasoning_content",
     "the APEX edit, where a turn without thinking has no empty thinking"},
};

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

/// Collects reasons, each once.
class Reasons {
  public:
    void add_if(bool differs, std::string_view reason) {
        if (!differs || has(text_, reason)) return;
        text_.append(text_.empty() ? "" : "; ").append(reason);
    }
    std::string text() const { return text_; }

  private:
    std::string text_;
};

/// The switches in which versions and edits differ, as they are written in all templates seen.
void compare_switches(std::string_view text, const ChatFormat* base, Reasons& reasons) {
    const bool on_request =
        has(text, "enable_thinking is defined and enable_thinking is true") ||
        (has(text, "enable_thinking is true") && !has(text, "enable_thinking is undefined or"));
    reasons.add_if(on_request, "it thinks only on request");
    reasons.add_if(!has(text, "enable_thinking") && has(text, R"(<think>\n\n</think>)"), "it never thinks");
    bool keeps = false;
    for (const char* unless : {"preserve_thinking is undefined or", "preserve_thinking is not defined or",
                               "preserve_thinking if preserve_thinking is defined else true"})
        keeps = keeps || has(text, unless);
    const bool drops = has(text, "preserve_thinking is defined and preserve_thinking is true");
    reasons.add_if(keeps && base != &kQwen38Chat, "it keeps earlier thinking unless told not to");
    reasons.add_if(drops && base == &kQwen38Chat, "it drops earlier thinking unless told not to");
    const bool python = has(text, "else args_value | string"), json = has(text, "else args_value | tojson");
    reasons.add_if(python && base != &kQwen35Chat,
                   "true, false and null in tool arguments are written as in Python, not as JSON");
    reasons.add_if(json && base == &kQwen35Chat,
                   "true, false and null in tool arguments are written as JSON, not as in Python");
}

std::string difference(std::string_view text, const ChatFormat* base) {
    Reasons reasons;
    for (const CommunityEdit& edit : kCommunity) reasons.add_if(has(text, edit.sign), edit.name);
    for (const auto& [feature, reason] : kFeatures) reasons.add_if(!has(text, feature), reason);
    compare_switches(text, base, reasons);
    return reasons.text();
}

ChatChoice choose(const std::string& directory) {
    const std::filesystem::path root(directory);
    std::string name = "chat_template.jinja";
    std::string text = read_small_file(root / name);
    if (text.empty()) {
        name = "the chat template in tokenizer_config.json";
        text = template_in_config(root / "tokenizer_config.json");
    }
    if (text.empty()) return {&kQwen36Chat, ""};
    if (const ChatFormat* format = official(text)) return {format, ""};
    const ChatFormat* base = nearest(text);
    const std::string reasons = difference(text, base);
    return {base, fmt::format("{} differs from the official one of {}{}; quern uses the official format",
                              name, base->name, reasons.empty() ? "" : ": " + reasons)};
}

}  // namespace

ChatChoice choose_qwen3_chat(const std::string& directory) {
    if (directory.empty()) return {&kQwen36Chat, ""};
    try {
        return choose(directory);
    } catch (const std::exception& error) {
        // Whoever needs the tokenizer's config reports it in full.
        return {&kQwen36Chat, std::string("the chat template cannot be read: ") + error.what()};
    }
}

}  // namespace quern
