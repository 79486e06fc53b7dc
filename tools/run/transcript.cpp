#include "tools/run/transcript.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "tools/common/fields.h"
#include "tools/common/messages.h"
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
    for (const MessageImage& image : m.images)  // transcripts keep words
        j["content"] = fmt::format("[image {}]\n{}", image.where, j["content"].get<std::string>());
    if (!m.tool_call_id.empty()) j["tool_call_id"] = m.tool_call_id;
    return j;
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
    const Json j = parse_json_ordered(read_input_file(path), path, {.kind = ErrorKind::usage});
    const auto list = j.find("messages");
    if (!j.is_object() || list == j.end() || !list->is_array())
        FAIL(usage, "{}: should be a JSON object with a list 'messages'", path);
    if (list->empty()) return {};
    try {
        return read_messages(*list);
    } catch (const FieldError& error) {
        FAIL(usage, "{}: {}", path, error.what());
    }
}

}  // namespace quern
