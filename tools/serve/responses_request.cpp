// Requests to /v1/responses of the OpenAI API as chat requests.
#include <fmt/format.h>

#include "tools/common/content_parts.h"
#include "tools/common/messages.h"
#include "tools/serve/other_formats.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

/// The name that the model sees of a function in a namespace.
std::string joined_name(const std::string& space, const std::string& name) {
    if (space.empty()) return name;
    return space + (space.ends_with('_') ? "" : ".") + name;
}

/// Items of a response and of its input, one by one, as messages of a chat.
class Conversation {
  public:
    explicit Conversation(const ordered_json& items) : items_(items) {}

    void add(size_t i) {
        where_ = fmt::format("input[{}]", i);
        item(items_[i]);
        origins_.resize(messages_.size(), where_);
    }
    void add_system(const std::string& text) {
        messages_.push_back({{"role", "system"}, {"content", text}});
        origins_.push_back("instructions");
    }
    ordered_json take_messages() { return std::move(messages_); }
    std::vector<std::string> take_origins() { return std::move(origins_); }

  private:
    void item(const ordered_json& value) {
        Fields f(value, where_);
        const std::string type = f.string("type").value_or("message");
        if (type == "message") return message(f);
        if (type == "reasoning") return reasoning(f);
        if (type == "item_reference") return reference(f);
        if (type == "function_call")
            return call(f, joined_name(f.string("namespace").value_or(""), f.string("name").value_or("")),
                        f.string("arguments").value_or("{}"));
        if (type == "custom_tool_call")
            return call(f, joined_name(f.string("namespace").value_or(""), f.string("name").value_or("")),
                        custom_arguments(f.string("input").value_or("")));
        for (const char* own : {"local_shell_call", "shell_call", "apply_patch_call", "computer_call"})
            if (type == own) return own_call(f, type);
        if (type.ends_with("_output")) return output(f);
        foreign(value, type);
    }

    void message(Fields& f) {
        const ordered_json* content = f.value("content");
        const std::string role = f.string("role").value_or("");
        const ordered_json text = content != nullptr    ? content_with_images(*content, f.full("content"))
                                  : role == "assistant" ? ordered_json("")
                                                        : ordered_json();
        if (role == "assistant" && only_thought())
            messages_.back()["content"] = text;
        else
            messages_.push_back({{"role", role}, {"content", text}});
    }

    void reasoning(Fields& f) {
        std::string text;
        for (const char* place : {"content", "summary"})
            if (const ordered_json* parts = f.list(place); parts != nullptr && text.empty())
                text = readable_text(*parts);
        messages_.push_back({{"role", "assistant"}, {"content", ""}, {"reasoning_content", text}});
    }

    /// An item that an earlier response has; it is in the conversation already, or nobody knows it.
    void reference(Fields& f) {
        const std::string id = f.string("id").value_or("");
        for (const ordered_json& one : items_)
            if (text_of(one, "id") == id && text_of(one, "type") != "item_reference") return;
        add_text("[an earlier item that is not kept here]");
    }

    /// Calls of one turn stand side by side, and belong to the message before them.
    void call(Fields& f, const std::string& name, const std::string& arguments) {
        const bool joins = !messages_.empty() && messages_.back()["role"] == "assistant";
        if (!joins) messages_.push_back({{"role", "assistant"}, {"content", ""}});
        messages_.back()["tool_calls"].push_back({{"id", f.string("call_id").value_or("")},
                                                  {"type", "function"},
                                                  {"function", {{"name", name}, {"arguments", arguments}}}});
    }

    /// A call of a tool that the API itself defines: shell commands, patches.
    void own_call(Fields& f, const std::string& type) {
        const ordered_json* action = f.value(type == "apply_patch_call" ? "operation" : "action");
        call(f, type.substr(0, type.size() - std::string("_call").size()),
             action != nullptr ? dump(*action) : "{}");
    }

    void output(Fields& f) {
        const ordered_json* value = f.value("output");
        ordered_json text = "";
        if (value != nullptr && value->is_array() && !value->empty() && (*value)[0].contains("type"))
            text = content_with_images(*value, f.full("output"));
        else if (value != nullptr)
            text = value->is_string() || value->is_array() ? readable_text(*value) : dump(*value);
        messages_.push_back(
            {{"role", "tool"}, {"tool_call_id", f.string("call_id").value_or("")}, {"content", text}});
    }

    /// What other servers ran: searches, interpreters, images.
    void foreign(const ordered_json& value, const std::string& type) {
        std::string text = readable_text(value);
        if (const auto action = value.find("action"); action != value.end()) text += readable_text(*action);
        add_text(fmt::format("[{}{}{}]", type.substr(0, 64), text.empty() ? "" : ": ", text));
    }

    void add_text(const std::string& text) {
        if (only_thought())
            messages_.back()["content"] = text;
        else
            messages_.push_back({{"role", "assistant"}, {"content", text}});
    }

    bool only_thought() const {
        return !messages_.empty() && messages_.back()["role"] == "assistant" &&
               messages_.back()["content"] == "" && !messages_.back().contains("tool_calls");
    }

    const ordered_json& items_;
    ordered_json messages_ = ordered_json::array();
    std::vector<std::string> origins_;
    std::string where_;
};

/// {"type": "function", "name", ...} as the chat API has it; "custom" is the same in both.
void add_tool(Fields& tool, const ordered_json& value, const std::string& space, ordered_json& out,
              ToolKinds& kinds) {
    const std::string name = tool.string("name").value_or(""), shown = joined_name(space, name);
    if (!space.empty()) kinds.spaces[shown] = {space, name};
    if (tool.string("type").value_or("") == "custom") {
        ordered_json custom = value;
        custom["name"] = shown;
        out.push_back(std::move(custom));
        return;
    }
    ordered_json function = {{"name", shown}};
    for (const char* key : {"description", "parameters", "strict"})
        if (const ordered_json* field = tool.value(key)) function[key] = *field;
    out.push_back({{"type", "function"}, {"function", function}});
}

void add_tools(const ordered_json& tools, const std::string& where, const std::string& space,
               ordered_json& out, ToolKinds& kinds) {
    for (size_t i = 0; i < tools.size(); ++i) {
        Fields tool(tools[i], fmt::format("{}[{}]", where, i));
        const std::string type = tool.string("type").value_or("");
        if (type == "namespace" && space.empty()) {
            if (const ordered_json* inner = tool.list("tools"))
                add_tools(*inner, tool.full("tools"), tool.string("name").value_or(""), out, kinds);
        } else if (type == "function" || type == "custom") {
            add_tool(tool, tools[i], space, out, kinds);
        } else {
            out.push_back({{"type", type.empty() ? "unknown" : type}});  // dropped, and said so
        }
    }
}

}  // namespace

ordered_json response_items(const ordered_json& body) {
    Fields f(body);
    const ordered_json* input = f.value("input");
    if (input == nullptr) throw FieldError("input", "input is missing");
    if (input->is_array()) return *input;
    if (!input->is_string()) throw wrong_value("input", "a text or a list of items", *input);
    return ordered_json::array({{{"type", "message"}, {"role", "user"}, {"content", *input}}});
}

ChatBody chat_from_responses(const ordered_json& body, const ordered_json& items) {
    Fields f(body);
    f.refuse({"conversation", "prompt"});
    if (f.boolean("background").value_or(false))
        throw FieldError("background", "background is not supported", "unsupported_parameter");
    ordered_json out = ordered_json::object();
    Conversation conversation(items);
    if (const auto text = f.string("instructions")) conversation.add_system(*text);
    for (size_t i = 0; i < items.size(); ++i) conversation.add(i);
    out["messages"] = conversation.take_messages();
    if (out["messages"].empty())  // some clients only look whether there is an answer
        out["messages"].push_back({{"role", "user"}, {"content", ""}});
    out["continue_final_message"] = false;
    ToolKinds kinds;
    if (const ordered_json* tools = f.list("tools"); tools != nullptr && !tools->empty()) {
        out["tools"] = ordered_json::array();
        add_tools(*tools, "tools", "", out["tools"], kinds);
    }
    if (const ordered_json* text = f.object("text")) {
        Fields inner(*text, "text");
        if (const ordered_json* format = inner.object("format")) out["response_format"] = *format;
    }
    if (const ordered_json* reasoning = f.object("reasoning"))
        if (const auto effort = Fields(*reasoning, "reasoning").string("effort"))
            out["reasoning_effort"] = *effort;
    if (const ordered_json* n = f.value("max_output_tokens")) out["max_tokens"] = *n;
    for (const char* same : {"model", "temperature", "top_p", "stream", "tool_choice", "parallel_tool_calls",
                             "metadata", "user", "prompt_cache_key"})
        if (const ordered_json* value = f.value(same)) out[same] = *value;
    f.ignore({"input", "previous_response_id", "store", "include", "truncation", "service_tier",
              "safety_identifier", "stream_options", "max_tool_calls", "top_logprobs", "client_metadata",
              "background"});
    for (const std::string& name : f.unknown()) out[name] = body[name];
    ChatBody chat = chat_body(std::move(out));
    chat.origins = conversation.take_origins();
    chat.names = {{"max_tokens", "max_output_tokens"},
                  {"reasoning_effort", "reasoning.effort"},
                  {"response_format", "text.format"}};
    chat.kinds.spaces = std::move(kinds.spaces);
    return chat;
}

}  // namespace quern
