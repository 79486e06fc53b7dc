#include "tools/common/messages.h"

#include <fmt/format.h>

#include <set>

#include "tools/common/content_parts.h"
#include "tools/common/fields.h"
#include "tools/common/images/read_images.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

constexpr size_t kMaxTools = 4096;

bool is_tool_name(const std::string& name) {
    return !name.empty() && name.size() <= 256 &&
           name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/") ==
               std::string::npos;
}

std::string as_text(const ordered_json* value) {
    if (value == nullptr) return "";
    return value->is_string() ? value->get<std::string>() : dump(*value);
}

ToolCall read_call(const ordered_json& call, const std::string& where) {
    Fields fields(call, where);
    ToolCall out;
    out.id = fields.string("id").value_or("");
    const ordered_json* function = fields.object("function");
    if (function == nullptr)
        throw FieldError(fields.full("function"), fields.full("function") + " is missing");
    Fields inner(*function, fields.full("function"));
    out.name = inner.string("name").value_or("");
    if (out.name.empty()) throw FieldError(inner.full("name"), inner.full("name") + " is missing");
    out.arguments = as_text(inner.value("arguments"));
    return out;
}

}  // namespace

ordered_json content_with_images(const ordered_json& content, const std::string& where) {
    const std::string text = read_content(content, where);
    return has_image_part(content) ? content : ordered_json(text);
}

std::string read_content(const ordered_json& content, const std::string& where,
                         std::vector<MessageImage>* images) {
    if (content.is_null()) return "";
    if (content.is_string()) return content.get<std::string>();
    if (!content.is_array()) throw wrong_value(where, "a string or a list of parts", content);
    std::string text;
    for (size_t i = 0; i < content.size(); ++i) {
        const std::string at = fmt::format("{}[{}]", where, i);
        if (content[i].is_string()) {
            text += content[i].get<std::string>();
            continue;
        }
        if (images != nullptr && is_image_part(content[i])) {
            images->push_back({.at = text.size(), .where = at, .part = content[i]});
            continue;
        }
        text += part_text(content[i], at);
    }
    return text;
}

std::vector<Message> read_messages(const ordered_json& list, const std::string& where) {
    if (!list.is_array()) throw wrong_value(where, "a list", list);
    if (list.empty()) throw FieldError(where, where + " is empty");
    std::vector<Message> out;
    out.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
        Fields fields(list[i], fmt::format("{}[{}]", where, i));
        Message m;
        std::string thinking;
        m.role = fields.string("role").value_or("");
        constexpr const char* kRoles[] = {"system", "developer", "user", "assistant", "tool"};
        if (std::find(std::begin(kRoles), std::end(kRoles), m.role) == std::end(kRoles))
            throw wrong_value(fields.full("role"), "system, developer, user, assistant or tool",
                              list[i].value("role", ordered_json()));
        if (const ordered_json* content = fields.value("content")) {
            m.content = read_content(*content, fields.full("content"), &m.images);
            if (!m.images.empty() && m.role != "user" && m.role != "tool")
                throw FieldError(m.images[0].where,
                                 m.images[0].where + ": images belong to messages of users and tools");
            thinking = thinking_of(*content);
        } else if (m.role == "user") {  // others may have nothing to say
            throw FieldError(
                fields.full("content"),
                fmt::format("{} is missing: a message of the role user needs a string or a list of parts",
                            fields.full("content")));
        }
        auto reasoning = fields.string("reasoning_content");
        if (!reasoning) reasoning = fields.string("reasoning");
        if (!reasoning && !thinking.empty()) reasoning = thinking;
        if (m.role == "assistant") m.reasoning = reasoning;
        if (const ordered_json* calls = fields.list("tool_calls"); calls != nullptr && m.role == "assistant")
            for (size_t c = 0; c < calls->size(); ++c)
                m.tool_calls.push_back(
                    read_call((*calls)[c], fmt::format("{}[{}]", fields.full("tool_calls"), c)));
        m.tool_call_id = fields.string("tool_call_id").value_or("");
        out.push_back(std::move(m));
    }
    return out;
}

ordered_json read_tools(const ordered_json& list) {
    std::set<std::string> names;
    if (!list.is_array()) throw wrong_value("tools", "a list", list);
    if (list.size() > kMaxTools)
        throw FieldError("tools",
                         fmt::format("tools: {} of them; at most {} are supported", list.size(), kMaxTools));
    for (size_t i = 0; i < list.size(); ++i) {
        Fields tool(list[i], fmt::format("tools[{}]", i));
        if (tool.string("type").value_or("function") != "function")
            throw wrong_value(tool.full("type"), "'function'", list[i]["type"]);
        const ordered_json* function = tool.object("function");
        if (function == nullptr)
            throw FieldError(tool.full("function"), tool.full("function") + " is missing");
        Fields inner(*function, tool.full("function"));
        const std::string name = inner.string("name").value_or("");
        if (!is_tool_name(name))
            throw wrong_value(inner.full("name"), "1 to 256 letters, digits and _-.:/", name);
        if (!names.insert(name).second)
            throw FieldError(inner.full("name"),
                             fmt::format("{}: two tools are named '{}'", inner.full("name"), name));
        inner.object("parameters");
    }
    return list;
}

}  // namespace quern
