#include "tools/run/transcript.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "tools/engine/atomic_file.h"
#include "tools/run/input.h"

namespace quern {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

Json to_json(const Message& m) {
    Json j = {{"role", m.role}, {"content", m.content}};
    if (m.reasoning) j["reasoning_content"] = *m.reasoning;
    for (const ToolCall& c : m.tool_calls)
        j["tool_calls"].push_back({{"id", c.id},
                                   {"type", "function"},
                                   {"function", {{"name", c.name}, {"arguments", c.arguments}}}});
    if (!m.tool_call_id.empty()) j["tool_call_id"] = m.tool_call_id;
    return j;
}

Message from_json(const nlohmann::json& j, const std::string& path) {
    const auto text = [&](const nlohmann::json& from, const char* key, bool required) -> std::string {
        const auto it = from.find(key);
        if (it != from.end() && it->is_string()) return it->get<std::string>();
        if (required || (it != from.end() && !it->is_null()))
            FAIL(usage, "{}: every message needs a text '{}'", path, key);
        return "";
    };
    if (!j.is_object()) FAIL(usage, "{}: every message should be an object", path);
    Message m{.role = text(j, "role", true), .content = text(j, "content", false)};
    if (j.contains("reasoning_content")) m.reasoning = text(j, "reasoning_content", false);
    if (const auto calls = j.find("tool_calls"); calls != j.end() && calls->is_array())
        for (const nlohmann::json& c : *calls) {
            const auto f = c.is_object() ? c.find("function") : c.end();
            if (!c.is_object() || f == c.end() || !f->is_object())
                FAIL(usage, "{}: every tool call needs a 'function'", path);
            m.tool_calls.push_back(
                {text(c, "id", false), text(*f, "name", true), text(*f, "arguments", true)});
        }
    m.tool_call_id = text(j, "tool_call_id", false);
    return m;
}

}  // namespace

std::string state_directory() {
    const char* state = std::getenv("XDG_STATE_HOME");
    const char* home = std::getenv("HOME");
    fs::path base;
    if (state != nullptr && *state == '/')
        base = state;
    else if (home != nullptr && *home == '/')
        base = fs::path(home) / ".local/state";
    else
        return "";
    const fs::path directory = base / "quern";
    std::error_code error;
    fs::create_directories(directory, error);
    if (error) return "";
    ::chmod(directory.c_str(), 0700);
    return directory.string();
}

std::string transcript_path(const std::string& name) {
    if (name.find('/') != std::string::npos) return name;
    const std::string state = state_directory();
    if (state.empty() || name.empty() || name[0] == '.')
        FAIL(usage, "'{}' is no name for a chat; give a path such as ./chat.json", name);
    std::error_code ignored;
    fs::create_directories(fs::path(state) / "chats", ignored);
    return (fs::path(state) / "chats" / (name + ".json")).string();
}

std::vector<std::string> list_transcripts() {
    std::vector<std::string> names;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(fs::path(state_directory()) / "chats", error))
        if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
    std::sort(names.begin(), names.end());
    return names;
}

void save_transcript(const std::string& path, const std::vector<Message>& messages) {
    Json j = {{"messages", Json::array()}};
    for (const Message& m : messages) j["messages"].push_back(to_json(m));
    AtomicFile file(path, 0600);
    file.write(j.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
    file.commit();
}

std::vector<Message> load_transcript(const std::string& path) {
    const nlohmann::json j = parse_json(read_input_file(path), path, {.kind = ErrorKind::usage});
    const auto list = j.is_object() ? j.find("messages") : j.end();
    if (!j.is_object() || list == j.end() || !list->is_array())
        FAIL(usage, "{}: should be a JSON object with a list 'messages'", path);
    std::vector<Message> messages;
    for (const nlohmann::json& m : *list) messages.push_back(from_json(m, path));
    return messages;
}

}  // namespace quern
