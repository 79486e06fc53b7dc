#include <algorithm>

#include "ggml-like/check.h"
#include "models/chat_format.h"
#include "models/json_depth.h"
#include "models/tokenizer.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kMarkers[] = {"<|im_start|>",    "<|im_end|>",      "<think>",
                                         "</think>",        "<tool_call>",     "</tool_call>",
                                         "<tool_response>", "</tool_response>"};

// The instructions for tool calls, word for word as the model was trained with them.
constexpr std::string_view kToolsBegin = "# Tools\n\nYou have access to the following functions:\n\n<tools>";
constexpr std::string_view kToolsEnd =
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple "
    "lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be "
    "nested "
    "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function "
    "call, but "
    "NOT after\n- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n</IMPORTANT>";

std::string_view strip_newlines_left(std::string_view s) {
    const size_t at = s.find_first_not_of('\n');
    return at == std::string_view::npos ? std::string_view() : s.substr(at);
}

std::string_view strip_newlines_right(std::string_view s) {
    const size_t at = s.find_last_not_of('\n');
    return at == std::string_view::npos ? std::string_view() : s.substr(0, at + 1);
}

/// Collects segments; neighbouring plain texts become one, so that tokens may span them as in the reference.
class Writer {
  public:
    /// Somebody's text: never a marker.
    void plain(std::string_view text) {
        if (text.empty()) return;
        if (prompt.segments.empty() || prompt.segments.back().control) prompt.segments.push_back({"", false});
        prompt.segments.back().text += text;
    }
    /// The format's own text: markers in it are markers.
    void format(std::string_view text) {
        while (!text.empty()) {
            size_t at = std::string_view::npos;
            std::string_view marker;
            for (std::string_view m : kMarkers)
                if (const size_t found = text.find(m); found < at) at = found, marker = m;
            plain(text.substr(0, at));
            if (at == std::string_view::npos) return;
            prompt.segments.push_back({std::string(marker), true});
            text.remove_prefix(at + marker.size());
        }
    }
    void end_turn() {
        format("<|im_end|>\n");
        prompt.boundaries.push_back(prompt.segments.size());
    }

    RenderedPrompt prompt;
};

struct AssistantText {
    std::string_view reasoning, content;
};

/// Thinking and answer of an assistant message; thinking written into the content is taken out of it.
AssistantText split_thinking(const Message& m) {
    std::string_view content = python_strip(m.content);
    if (m.reasoning) return {python_strip(*m.reasoning), content};
    constexpr std::string_view kOpen = "<think>", kClose = "</think>";
    const size_t first = content.find(kClose);
    if (first == std::string_view::npos) return {{}, content};
    std::string_view reasoning = strip_newlines_right(content.substr(0, first));
    if (const size_t open = reasoning.rfind(kOpen); open != std::string_view::npos)
        reasoning.remove_prefix(open + kOpen.size());
    const size_t last = content.rfind(kClose);
    return {python_strip(strip_newlines_left(reasoning)),
            strip_newlines_left(content.substr(last + kClose.size()))};
}

void write_call(Writer& w, const ToolCall& call) {
    w.format("<tool_call>");
    w.plain("\n<function=" + call.name + ">\n");
    const auto parameter = [&](std::string_view key, std::string_view value) {
        w.plain("<parameter=");
        w.plain(key);
        w.plain(">\n");
        w.plain(value);
        w.plain("\n</parameter>\n");
    };
    const Json arguments =
        shallow_enough(call.arguments) ? Json::parse(call.arguments, nullptr, false) : Json();
    if (arguments.is_object()) {
        for (const auto& [key, value] : arguments.items())
            parameter(key, value.is_string() ? value.get<std::string>() : python_json(value));
    } else if (!python_strip(call.arguments).empty()) {
        parameter("arguments", call.arguments);  // not an object: shown as it is rather than lost
    }
    w.plain("</function>\n");
    w.format("</tool_call>");
}

void write_assistant(Writer& w, const Message& m, bool keep_thinking) {
    const AssistantText text = split_thinking(m);
    w.format("<|im_start|>assistant\n");
    if (keep_thinking) {
        w.format("<think>\n");
        w.plain(text.reasoning);
        w.format("\n</think>\n\n");
    }
    w.plain(text.content);
    for (size_t i = 0; i < m.tool_calls.size(); ++i) {
        if (i > 0)
            w.plain("\n");
        else if (!python_strip(text.content).empty())
            w.plain("\n\n");
        write_call(w, m.tool_calls[i]);
    }
    w.end_turn();
}

bool is_tool_response(std::string_view content) {
    content = python_strip(content);
    return content.starts_with("<tool_response>") && content.ends_with("</tool_response>");
}

struct Conversation {
    bool has_system = false;
    std::string system;
    std::vector<const Message*> turns;
    size_t last_query = SIZE_MAX;  // index in turns
};

Conversation normalize(std::span<const Message> messages) {
    Conversation c;
    for (const Message& m : messages) {
        if (m.role == "system" || m.role == "developer") {
            c.has_system = true;
            const std::string_view text = python_strip(m.content);
            if (!c.system.empty() && !text.empty()) c.system += "\n\n";
            c.system += text;
            continue;
        }
        if (m.role != "user" && m.role != "assistant" && m.role != "tool")
            FAIL(usage, "message role '{}' is unknown; use system, developer, user, assistant or tool",
                 m.role);
        if (m.role == "user" && !is_tool_response(m.content)) c.last_query = c.turns.size();
        c.turns.push_back(&m);
    }
    return c;
}

void write_system(Writer& w, const Conversation& c, const Json& tools) {
    const bool has_tools = tools.is_array() && !tools.empty();
    if (!has_tools && !c.has_system) return;
    w.format("<|im_start|>system\n");
    if (has_tools) {
        w.format(kToolsBegin);
        for (const Json& tool : tools) w.plain("\n" + python_json(tool));
        w.format(kToolsEnd);
        if (!c.system.empty()) w.plain("\n\n");
    }
    w.plain(c.system);
    w.end_turn();
}

}  // namespace

RenderedPrompt render_chat(std::span<const Message> messages, const Json& tools, const ChatOptions& options) {
    if (messages.empty()) FAIL(usage, "the conversation is empty: at least one message is needed");
    const Conversation c = normalize(messages);
    Writer w;
    write_system(w, c, tools);
    for (size_t i = 0; i < c.turns.size(); ++i) {
        const Message& m = *c.turns[i];
        const auto is_tool = [&](size_t at) { return at < c.turns.size() && c.turns[at]->role == "tool"; };
        if (m.role == "user") {
            w.format("<|im_start|>user\n");
            w.plain(python_strip(m.content));
            w.end_turn();
        } else if (m.role == "assistant") {
            const bool after_query = c.last_query != SIZE_MAX && i > c.last_query;
            write_assistant(w, m, after_query || options.preserve_thinking);
        } else {  // neighbouring tool results share one user turn
            if (i == 0 || !is_tool(i - 1)) w.format("<|im_start|>user");
            w.format("\n<tool_response>\n");
            w.plain(python_strip(m.content));
            w.format("\n</tool_response>");
            if (!is_tool(i + 1)) w.end_turn();
        }
    }
    if (options.add_generation_prompt) {
        w.format("<|im_start|>assistant\n");
        w.format(options.thinking ? "<think>\n" : "<think>\n\n</think>\n\n");
        w.prompt.thinking_open = options.thinking;
    }
    return std::move(w.prompt);
}

std::string RenderedPrompt::text() const {
    std::string all;
    for (const PromptSegment& s : segments) all += s.text;
    return all;
}

std::vector<int32_t> encode_prompt(const RenderedPrompt& prompt, const Tokenizer& tokenizer) {
    std::vector<int32_t> ids;
    for (const PromptSegment& s : prompt.segments) {
        if (const auto id = s.control ? tokenizer.find_added(s.text) : std::nullopt) {
            ids.push_back(*id);
            continue;
        }
        const auto part = tokenizer.encode(s.text, Tokenizer::Markers::literal);
        ids.insert(ids.end(), part.begin(), part.end());
    }
    return ids;
}

}  // namespace quern
