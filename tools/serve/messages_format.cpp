// /v1/messages of the Anthropic API: its requests as chat requests, and answers in its form.
#include <fmt/format.h>

#include "tools/common/messages.h"
#include "tools/serve/other_formats.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

/// Messages of the chat request and where each one was.
struct Conversation {
    ordered_json messages = ordered_json::array();
    std::vector<std::string> origins;

    void add(ordered_json message, const std::string& where) {
        messages.push_back(std::move(message));
        origins.push_back(where);
    }
};

/// Claude Code begins its system prompt with a line that is another one in every request: no state of an earlier turn
/// would be found again.
std::string without_billing(std::string text) {
    if (!text.starts_with("x-anthropic-billing-header:")) return text;
    const size_t end = text.find('\n');
    return end == std::string::npos ? "" : text.substr(end + 1);
}

std::string system_text(const ordered_json& system) {
    if (!system.is_array()) return without_billing(read_content(system, "system"));
    std::string out;
    for (size_t i = 0; i < system.size(); ++i)
        out += without_billing(read_content(ordered_json::array({system[i]}), fmt::format("system[{}]", i)));
    return out;
}

/// One message with typed blocks becomes one or several: results of tools are messages of their own.
void add_message(const ordered_json& message, const std::string& where, Conversation& out) {
    Fields f(message, where);
    const std::string role = f.string("role").value_or("");
    const ordered_json* content = f.value("content");
    if (content == nullptr || !content->is_array()) return out.add(message, where);
    ordered_json parts = ordered_json::array(), calls = parts;
    std::string thinking;
    for (size_t i = 0; i < content->size(); ++i) {
        const std::string at = fmt::format("{}.content[{}]", where, i);
        Fields block((*content)[i], at);
        const std::string type = block.string("type").value_or("text");
        if (type == "tool_result") {
            const ordered_json* result = block.value("content");
            out.add({{"role", "tool"},
                     {"tool_call_id", block.string("tool_use_id").value_or("")},
                     {"content",
                      result != nullptr ? content_with_images(*result, at + ".content") : ordered_json("")}},
                    at);
        } else if (type == "tool_use") {
            const ordered_json* input = block.object("input");
            calls.push_back({{"id", block.string("id").value_or("")},
                             {"type", "function"},
                             {"function",
                              {{"name", block.string("name").value_or("")},
                               {"arguments", input != nullptr ? dump(*input) : "{}"}}}});
        } else if (type == "thinking") {
            thinking += block.string("thinking").value_or("");
        } else if (type != "redacted_thinking") {
            parts.push_back((*content)[i]);
        }
    }
    if (parts.empty() && calls.empty() && thinking.empty()) return;
    ordered_json one = {{"role", role}, {"content", parts}};
    if (!calls.empty()) one["tool_calls"] = calls;
    if (!thinking.empty()) one["reasoning_content"] = thinking;
    out.add(std::move(one), where);
}

/// `dropped`: types of tools that the API's own servers run.
ordered_json chat_tools(const ordered_json& tools, std::vector<std::string>& dropped) {
    ordered_json out = ordered_json::array();
    for (size_t i = 0; i < tools.size(); ++i) {
        Fields tool(tools[i], fmt::format("tools[{}]", i));
        if (const std::string type = tool.string("type").value_or("custom"); type != "custom") {
            dropped.push_back("tools " + type);
            continue;
        }
        ordered_json function = {{"name", tool.string("name").value_or("")}};
        if (const auto text = tool.string("description")) function["description"] = *text;
        const ordered_json* schema = tool.object("input_schema");
        function["parameters"] = schema != nullptr ? *schema : ordered_json{{"type", "object"}};
        out.push_back({{"type", "function"}, {"function", function}});
    }
    return out;
}

ordered_json chat_tool_choice(Fields choice) {
    const std::string type = choice.string("type").value_or("auto");
    if (type == "any") return "required";
    if (type == "tool")
        return {{"type", "function"}, {"function", {{"name", choice.string("name").value_or("")}}}};
    if (type == "auto" || type == "none") return type;
    throw wrong_value("tool_choice.type", "auto, any, tool or none", type);
}

/// {"format": {"type": "json_schema", "schema"}, "effort"}; the first form of the API had the format alone.
void add_output_config(const ordered_json& config, const char* place, ordered_json& out) {
    Fields f(config, place);
    const ordered_json* format = f.string("type") ? &config : f.object("format");
    if (format != nullptr) out["response_format"] = *format;
    if (const auto effort = f.string("effort")) out["reasoning_effort"] = *effort;
}

class MessagesFormat final : public AnswerFormat {
  public:
    explicit MessagesFormat(const GenerationRequest& request)
        : model_(request.model), id_(random_id("msg_")), prompt_tokens_(request.prompt_tokens()) {}

    ordered_json whole(const std::vector<Choice>& choices) override {
        const Choice& c = choices.front();
        ordered_json content = ordered_json::array();
        if (!c.reasoning.empty())
            content.push_back({{"type", "thinking"}, {"thinking", c.reasoning}, {"signature", ""}});
        if (!c.content.empty()) content.push_back({{"type", "text"}, {"text", c.content}});
        for (const ToolCall& call : c.calls) {
            ordered_json block = tool_use(call);
            block["input"] = ordered_json::parse(call.arguments, nullptr, false);
            if (block["input"].is_discarded()) block["input"] = ordered_json::object();
            content.push_back(std::move(block));
        }
        ordered_json out = message(content);
        out["stop_reason"] = stop_reason(c);
        out["stop_sequence"] = stop_sequence(c);
        out["usage"] = usage(c.outcome);
        out["timings"] = timings_json(c.outcome);
        return out;
    }

    std::string begin() override {
        ordered_json m = message(ordered_json::array());
        m["stop_reason"] = m["stop_sequence"] = nullptr;
        m["usage"] = {{"input_tokens", prompt_tokens_}, {"output_tokens", 0}};
        return event({{"type", "message_start"}, {"message", m}});
    }

    std::string delta(int, const AnswerDelta& d) override {
        std::string out;
        if (!d.reasoning.empty()) {
            out += open(Block::thinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
            out += block_delta({{"type", "thinking_delta"}, {"thinking", d.reasoning}});
        }
        if (!d.content.empty()) {
            out += open(Block::text, {{"type", "text"}, {"text", ""}});
            out += block_delta({{"type", "text_delta"}, {"text", d.content}});
        }
        for (const ToolCallPiece& piece : d.call_pieces) {
            if (!piece.name.empty()) {
                out += shut();
                ++begun_;
                ordered_json block = tool_use({piece.id, piece.name, {}});
                block["input"] = ordered_json::object();
                out += open(Block::tool, block);
            }
            out += block_delta({{"type", "input_json_delta"}, {"partial_json", piece.arguments}});
        }
        done_ += d.tool_calls.size();
        if (open_ == Block::tool && done_ >= begun_) out += shut();
        return out;
    }

    std::string end(int, const Choice& all) override {
        return shut() +
               event({{"type", "message_delta"},
                      {"delta", {{"stop_reason", stop_reason(all)}, {"stop_sequence", stop_sequence(all)}}},
                      {"usage", usage(all.outcome)},
                      {"timings", timings_json(all.outcome)}});
    }
    std::string close(const std::vector<Choice>&) override { return event({{"type", "message_stop"}}); }
    std::string ping() override { return event({{"type", "ping"}}); }
    std::string error(const ApiError& error) override { return event(error.json(ErrorForm::anthropic)); }

  private:
    enum class Block { none, thinking, text, tool };

    static std::string event(const ordered_json& data) {
        return "event: " + data["type"].get<std::string>() + "\ndata: " + dump(data) + "\n\n";
    }
    static ordered_json tool_use(const ToolCall& call) {
        return {{"type", "tool_use"}, {"id", call.id}, {"name", call.name}};
    }
    static const char* stop_reason(const Choice& c) {
        if (c.outcome.stop_text) return "stop_sequence";
        if (c.outcome.end == Outcome::End::length) return "max_tokens";
        return c.calls.empty() ? "end_turn" : "tool_use";
    }
    static ordered_json stop_sequence(const Choice& c) {
        return c.outcome.stop_text ? ordered_json(*c.outcome.stop_text) : ordered_json();
    }
    static ordered_json usage(const Outcome& o) {
        return {{"input_tokens", o.prompt_tokens - o.cached_tokens},
                {"cache_read_input_tokens", o.cached_tokens},
                {"cache_creation_input_tokens", 0},
                {"output_tokens", o.answer_tokens}};
    }
    ordered_json message(const ordered_json& content) const {
        return {
            {"id", id_}, {"type", "message"}, {"role", "assistant"}, {"model", model_}, {"content", content}};
    }
    std::string open(Block kind, const ordered_json& block) {
        if (open_ == kind) return {};
        std::string out = shut();
        open_ = kind;
        return out + event({{"type", "content_block_start"}, {"index", index_}, {"content_block", block}});
    }
    std::string block_delta(const ordered_json& delta) const {
        return event({{"type", "content_block_delta"}, {"index", index_}, {"delta", delta}});
    }
    std::string shut() {
        if (open_ == Block::none) return {};
        open_ = Block::none;
        return event({{"type", "content_block_stop"}, {"index", index_++}});
    }

    std::string model_, id_;
    int64_t prompt_tokens_;
    Block open_ = Block::none;
    int index_ = 0;
    size_t begun_ = 0, done_ = 0;  // calls
};

}  // namespace

ChatBody chat_from_messages(const ordered_json& body) {
    Fields f(body);
    ordered_json out = ordered_json::object();
    Conversation conversation;
    std::vector<std::string> dropped;
    if (const ordered_json* system = f.value("system"))
        if (const std::string text = system_text(*system); !text.empty())
            conversation.add({{"role", "system"}, {"content", text}}, "system");
    const ordered_json* list = f.list("messages");
    if (list == nullptr) throw FieldError("messages", "messages is missing");
    if (list->empty()) throw FieldError("messages", "messages is empty");
    for (size_t i = 0; i < list->size(); ++i)
        add_message((*list)[i], fmt::format("messages[{}]", i), conversation);
    out["messages"] = std::move(conversation.messages);
    if (const ordered_json* tools = f.list("tools"); tools != nullptr && !tools->empty())
        if (ordered_json usable = chat_tools(*tools, dropped); !usable.empty())
            out["tools"] = std::move(usable);
    if (const ordered_json* choice = f.object("tool_choice")) {
        Fields inner(*choice, "tool_choice");
        if (inner.boolean("disable_parallel_tool_use").value_or(false)) out["parallel_tool_calls"] = false;
        out["tool_choice"] = chat_tool_choice(std::move(inner));
    }
    if (const ordered_json* stop = f.list("stop_sequences"); stop != nullptr && !stop->empty())
        out["stop"] = *stop;
    for (const char* place : {"output_config", "output_format"})
        if (const ordered_json* config = f.object(place)) add_output_config(*config, place, out);
    f.ignore({"context_management", "container", "mcp_servers", "inference_geo", "cache_control"});
    for (const char* same :
         {"model", "max_tokens", "temperature", "top_p", "top_k", "stream", "thinking", "metadata"})
        if (const ordered_json* value = f.value(same)) out[same] = *value;
    if (!out.contains("thinking")) out["enable_thinking"] = false;  // off unless asked for, as in that API
    for (const std::string& name : f.unknown()) out[name] = body[name];
    ChatBody chat = chat_body(std::move(out));
    chat.origins = std::move(conversation.origins);
    chat.names = {{"stop", "stop_sequences"}};
    if (f.value("output_config") != nullptr)
        chat.names.insert(
            {{"response_format", "output_config.format"}, {"reasoning_effort", "output_config.effort"}});
    chat.dropped.insert(chat.dropped.end(), dropped.begin(), dropped.end());
    return chat;
}

std::unique_ptr<AnswerFormat> messages_format(const GenerationRequest& request) {
    return std::make_unique<MessagesFormat>(request);
}

}  // namespace quern
