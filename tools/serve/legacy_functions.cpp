#include "tools/serve/legacy_functions.h"

#include <fmt/format.h>

namespace quern {

using nlohmann::ordered_json;

namespace {

bool offer(ordered_json& body) {
    const auto functions = body.find("functions");
    if (functions == body.end() || !functions->is_array() || body.contains("tools")) return false;
    ordered_json tools = ordered_json::array();
    for (const ordered_json& function : *functions)
        tools.push_back({{"type", "function"}, {"function", function}});
    body.erase("functions");
    body["tools"] = std::move(tools);
    body["parallel_tool_calls"] = false;
    if (const auto call = body.find("function_call"); call != body.end()) {
        const ordered_json choice = *call;
        body.erase("function_call");
        body["tool_choice"] =
            choice.is_object() ? ordered_json{{"type", "function"}, {"function", choice}} : choice;
    }
    return true;
}

/// Calls had no ids: a result belongs to the call before it.
void settle_history(ordered_json& messages) {
    int calls = 0;
    for (ordered_json& message : messages) {
        if (!message.is_object()) continue;
        if (const auto call = message.find("function_call"); call != message.end()) {
            const ordered_json function = *call;
            message.erase("function_call");
            if (!function.is_object()) continue;
            message["tool_calls"] = ordered_json::array({{{"id", fmt::format("function_{}", ++calls)},
                                                          {"type", "function"},
                                                          {"function", function}}});
        } else if (const auto role = message.find("role"); role != message.end() && *role == "function") {
            *role = "tool";
            message["tool_call_id"] = fmt::format("function_{}", calls);
        }
    }
}

}  // namespace

bool functions_to_tools(ordered_json& body) {
    if (const auto messages = body.find("messages"); messages != body.end() && messages->is_array())
        settle_history(*messages);
    return offer(body);
}

}  // namespace quern
