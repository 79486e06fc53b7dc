// Looks at a checkpoint's chat template: is it one whose rules render_chat follows?
#include <filesystem>

#include "ggml-like/json_guard.h"
#include "models/chat_format.h"
#include "models/checkpoint_files.h"

namespace quern {
namespace {

std::string read_template(const std::string& directory) {
    namespace fs = std::filesystem;
    constexpr uint64_t kLimit = 16 << 20;
    std::error_code ignored;
    if (const fs::path file = fs::path(directory) / "chat_template.jinja"; fs::is_regular_file(file, ignored))
        return read_text_file(file.string(), kLimit);
    const fs::path file = fs::path(directory) / "tokenizer_config.json";
    if (!fs::is_regular_file(file, ignored)) return "";
    const nlohmann::json config = parse_json(read_text_file(file.string(), kLimit), file.string());
    const auto it = config.find("chat_template");
    return config.is_object() && it != config.end() && it->is_string() ? it->get<std::string>() : "";
}

}  // namespace

std::string known_template_note(const std::string& directory) {
    const std::string text = read_template(directory);
    if (text.empty()) return "";
    for (const char* part : {"<|im_start|>", "<|im_end|>", "<think>", "enable_thinking",
                             "<function=", "<parameter=", "<tool_response>"})
        if (text.find(part) == std::string::npos)
            return "the checkpoint's chat template is not one that quern knows (it lacks " +
                   std::string(part) + "); the Qwen3.6 format is used";
    if (text.find("enable_thinking is true") != std::string::npos)
        return "the checkpoint's chat template thinks only on request; quern thinks unless told not to "
               "(/nothink)";
    return "";
}

}  // namespace quern
