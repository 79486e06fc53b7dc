#include "tools/serve/chat_body.h"

#include <fmt/format.h>

#include <charconv>

#include "tools/serve/legacy_functions.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

bool is_word(const ordered_json& body, const char* name, std::string_view word) {
    const auto found = body.find(name);
    return found != body.end() && found->is_string() && found->get_ref<const std::string&>() == word;
}

std::string type_of(const ordered_json& value, const char* otherwise) {
    const auto found = value.is_object() ? value.find("type") : value.end();
    return value.is_object() && found != value.end() && found->is_string() ? found->get<std::string>()
                                                                           : otherwise;
}

void drop_empty_fields(ordered_json& body) {
    for (const char* name : {"stop", "grammar", "reasoning_effort", "suffix", "guided_regex"})
        if (is_word(body, name, "")) body.erase(name);
    if (const auto functions = body.find("functions");
        functions != body.end() && functions->is_array() && functions->empty())
        body.erase("functions");
    if (!body.contains("functions") &&
        (is_word(body, "function_call", "none") || is_word(body, "function_call", "auto")))
        body.erase("function_call");
    const auto stop = body.find("stop");
    if (stop == body.end() || !stop->is_array()) return;
    ordered_json texts = ordered_json::array();
    for (const ordered_json& text : *stop)
        if (!text.is_string() || !text.get_ref<const std::string&>().empty()) texts.push_back(text);
    *stop = std::move(texts);
}

/// {"type": "custom", "custom": {"name"}}, or with the name beside the type.
std::string custom_name(const ordered_json& value) {
    const auto inner = value.find("custom");
    const ordered_json& named = inner != value.end() && inner->is_object() ? *inner : value;
    const auto name = named.find("name");
    return name != named.end() && name->is_string() ? name->get<std::string>() : "";
}

void settle_tool_choice(ChatBody& chat) {
    const auto choice = chat.body.find("tool_choice");
    if (choice == chat.body.end() || !choice->is_object()) return;
    const std::string type = type_of(*choice, "function");
    if (type == "auto" || type == "none" || type == "required") {
        *choice = type;
    } else if (type == "any") {
        *choice = "required";
    } else if (type == "custom") {
        *choice = {{"type", "function"}, {"function", {{"name", custom_name(*choice)}}}};
    } else if (type != "function" && type != "allowed_tools") {
        chat.dropped.push_back("tool_choice " + type);
        chat.body.erase("tool_choice");
    }
}

void settle_tools(ChatBody& chat) {
    const auto tools = chat.body.find("tools");
    if (tools == chat.body.end() || !tools->is_array()) return;
    ordered_json usable = ordered_json::array();
    for (const ordered_json& tool : *tools) {
        const std::string type = type_of(tool, "function");
        if (type == "custom") {
            chat.kinds.custom.insert(custom_name(tool));
            usable.push_back(custom_as_function(tool));
        } else if (type == "function") {
            usable.push_back(tool);
        } else {
            chat.dropped.push_back("tools " + type);
        }
    }
    *tools = std::move(usable);
    if (tools->empty()) chat.body.erase("tools");
}

/// Calls of custom tools in earlier turns.
void settle_history(ordered_json& body) {
    const auto messages = body.find("messages");
    if (messages == body.end() || !messages->is_array()) return;
    for (ordered_json& message : *messages) {
        const auto calls = message.is_object() ? message.find("tool_calls") : message.end();
        if (!message.is_object() || calls == message.end() || !calls->is_array()) continue;
        for (ordered_json& call : *calls) {
            if (type_of(call, "function") != "custom" || !call.contains("custom")) continue;
            const ordered_json& custom = call["custom"];
            const auto input = custom.is_object() ? custom.find("input") : custom.end();
            const bool text = custom.is_object() && input != custom.end() && input->is_string();
            call["function"] = {{"name", custom_name(call)},
                                {"arguments", custom_arguments(text ? input->get<std::string>() : "")}};
        }
    }
}

}  // namespace

ordered_json custom_as_function(const ordered_json& tool) {
    const auto inner = tool.find("custom");
    const ordered_json& custom = inner != tool.end() && inner->is_object() ? *inner : tool;
    Fields f(custom, "tools.custom");
    std::string text = f.string("description").value_or("");
    if (const ordered_json* format = f.object("format"); format != nullptr) {
        const ordered_json grammar = format->value("grammar", *format);
        Fields g(grammar, "tools.custom.format");
        if (const auto definition = g.string("definition"))
            text += fmt::format("\n\nThe input follows this grammar ({}):\n{}",
                                g.string("syntax").value_or("lark"), *definition);
    }
    return {{"type", "function"},
            {"function",
             {{"name", custom_name(tool)},
              {"description", text},
              {"parameters",
               {{"type", "object"},
                {"properties",
                 {{kCustomInput, {{"type", "string"}, {"description", "The whole input, as plain text."}}}}},
                {"required", {kCustomInput}}}}}}};
}

std::string custom_input(const std::string& arguments) {
    const ordered_json json = ordered_json::parse(arguments, nullptr, false);
    if (!json.is_object()) return arguments;
    const auto input = json.find(kCustomInput);
    if (input != json.end() && input->is_string()) return input->get<std::string>();
    return json.empty() ? "" : dump(json);
}

std::string custom_arguments(const std::string& input) { return dump({{kCustomInput, input}}); }

ChatBody chat_body(ordered_json body) {
    ChatBody chat{.body = std::move(body)};
    if (!chat.body.is_object()) return chat;
    drop_empty_fields(chat.body);
    chat.kinds.legacy = functions_to_tools(chat.body);
    settle_tools(chat);
    settle_tool_choice(chat);
    settle_history(chat.body);
    return chat;
}

FieldError as_named(const FieldError& error, const std::map<std::string, std::string>& names) {
    for (const auto& [ours, theirs] : names) {
        if (error.field != ours && !error.field.starts_with(ours + ".")) continue;
        std::string message = error.what();
        if (message.starts_with(ours)) message.replace(0, ours.size(), theirs);
        return {theirs + error.field.substr(ours.size()), message, error.code};
    }
    return error;
}

FieldError at_origin(const FieldError& error, const std::vector<std::string>& origins) {
    constexpr std::string_view kHead = "messages[";
    if (!error.field.starts_with(kHead)) return error;
    size_t index = 0;
    const char* end = error.field.data() + error.field.size();
    const auto [stop, failed] = std::from_chars(error.field.data() + kHead.size(), end, index);
    if (failed != std::errc{} || stop == end || *stop != ']' || index >= origins.size()) return error;
    const auto length = static_cast<size_t>(stop + 1 - error.field.data());
    const std::string from = error.field.substr(0, length), &to = origins[index];
    std::string message = error.what();
    for (size_t at = message.find(from); at != std::string::npos; at = message.find(from, at + to.size()))
        message.replace(at, from.size(), to);
    return {to + error.field.substr(length), message, error.code};
}

}  // namespace quern
