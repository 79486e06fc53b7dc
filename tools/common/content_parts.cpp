#include "tools/common/content_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tools/common/fields.h"
#include "tools/common/messages.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

bool is_thinking(const std::string& type) {
    return type == "thinking" || type == "redacted_thinking" || type == "reasoning";
}

std::string left_out(const std::string& what) {
    return fmt::format("[{} left out: only text can be read here]", what.substr(0, 64));
}

std::string titled(Fields& part, const std::string& text) {
    std::string out;
    for (const char* name : {"title", "source"})
        if (const ordered_json* value = part.value(name); value != nullptr && value->is_string())
            out += value->get<std::string>() + "\n";
    return out + text;
}

/// {"source": {"type": "text", "data"}}, or with parts of its own.
std::string document_text(Fields& part, const std::string& where) {
    const ordered_json* source = part.value("source");
    if (source != nullptr && source->is_object()) {
        const std::string type = text_of(*source, "type");
        if (type == "text" && source->contains("data") && (*source)["data"].is_string())
            return titled(part, (*source)["data"].get<std::string>());
        if (type == "content" && source->contains("content"))
            return titled(part, read_content((*source)["content"], where + ".source.content"));
    }
    const ordered_json* title = part.value("title");
    return left_out(title != nullptr && title->is_string() ? "document " + title->get<std::string>()
                                                           : "document");
}

/// What a server other than this one ran in the middle of an answer.
std::string foreign_call(Fields& part) {
    const ordered_json* input = part.value("input");
    return fmt::format("[{} was run{}]", part.string("name").value_or("a tool").substr(0, 64),
                       input != nullptr ? " with " + dump(*input) : "");
}

}  // namespace

std::string text_of(const ordered_json& object, const char* name) {
    if (!object.is_object()) return "";
    const auto found = object.find(name);
    return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string readable_text(const ordered_json& value) {
    if (value.is_string()) return value.get<std::string>();
    static constexpr std::array kNames = {"title",  "url",    "text",       "query",   "output",
                                          "stdout", "stderr", "error_code", "content", "summary"};
    std::string out;
    const auto add = [&](const std::string& text) {
        if (!text.empty()) out.append(out.empty() ? "" : "\n").append(text);
    };
    if (value.is_array())
        for (const ordered_json& one : value) add(readable_text(one));
    if (value.is_object())
        for (const char* name : kNames)
            if (const auto found = value.find(name); found != value.end()) add(readable_text(*found));
    return out;
}

std::string part_text(const ordered_json& part, const std::string& where) {
    Fields f(part, where);
    const std::string type = f.string("type").value_or("text");
    if (is_thinking(type)) return "";
    if (type == "refusal") return f.string("refusal").value_or("");
    if (type == "document") return document_text(f, where);
    if (type == "search_result") return titled(f, readable_text(part.value("content", ordered_json())));
    if (type == "tool_reference")
        return fmt::format("[tool {}]", f.string("tool_name").value_or("").substr(0, 256));
    if (type == "compaction") return readable_text(part.value("content", ordered_json()));
    if (type == "server_tool_use" || type == "mcp_tool_use") return foreign_call(f);
    if (type.ends_with("_tool_result"))
        return fmt::format("[its result: {}]", readable_text(part.value("content", ordered_json())));
    if (const ordered_json* text = f.value("text"); text != nullptr || type.ends_with("text"))
        return f.string("text").value_or("");
    std::string kind = type;
    for (const char* edge : {"input_", "output_", "_url"})
        if (const size_t at = kind.find(edge);
            at != std::string::npos && kind.size() > std::string(edge).size())
            kind.erase(at, std::string(edge).size());
    return left_out(kind);
}

std::string thinking_of(const ordered_json& content) {
    std::string out;
    if (!content.is_array()) return out;
    for (const ordered_json& part : content) {
        if (!part.is_object() || !part.contains("type") || !part["type"].is_string()) continue;
        if (!is_thinking(part["type"].get<std::string>())) continue;
        for (const char* name : {"thinking", "reasoning", "text"})
            if (const auto found = part.find(name); found != part.end() && found->is_string()) {
                out += found->get<std::string>();
                break;
            }
    }
    return out;
}

}  // namespace quern
