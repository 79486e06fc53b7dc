// /v1/responses of the OpenAI API.
#include <fmt/format.h>

#include <ctime>

#include "tools/common/messages.h"
#include "tools/serve/other_formats.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

void add_call(Fields& f, ordered_json& messages) {
    const ordered_json call = {
        {"id", f.string("call_id").value_or("")},
        {"type", "function"},
        {"function",
         {{"name", f.string("name").value_or("")}, {"arguments", f.string("arguments").value_or("{}")}}}};
    // Calls of one turn stand side by side, and belong to the message before them.
    const bool joins = !messages.empty() && messages.back()["role"] == "assistant";
    if (!joins) messages.push_back({{"role", "assistant"}, {"content", ""}});
    messages.back()["tool_calls"].push_back(call);
}

void add_reasoning(Fields& f, ordered_json& messages) {
    std::string text;
    for (const char* place : {"content", "summary"})
        if (const ordered_json* parts = f.list(place); parts != nullptr && text.empty())
            for (const ordered_json& part : *parts)
                if (part.is_object()) text += part.value("text", "");
    messages.push_back({{"role", "assistant"}, {"content", ""}, {"reasoning_content", text}});
}

void add_item(const ordered_json& item, const std::string& where, ordered_json& messages) {
    Fields f(item, where);
    const std::string type = f.string("type").value_or("message");
    if (type == "function_call") return add_call(f, messages);
    if (type == "reasoning") return add_reasoning(f, messages);
    if (type == "function_call_output") {
        const ordered_json* output = f.value("output");
        messages.push_back({{"role", "tool"},
                            {"tool_call_id", f.string("call_id").value_or("")},
                            {"content", output != nullptr ? read_content(*output, f.full("output")) : ""}});
        return;
    }
    if (type != "message")
        throw FieldError(f.full("type"),
                         fmt::format("{}: items of type '{}' are not supported", where, type));
    const ordered_json* content = f.value("content");
    const std::string role = f.string("role").value_or("");
    const std::string text = content != nullptr ? read_content(*content, f.full("content")) : "";
    const bool after_thinking = role == "assistant" && !messages.empty() &&
                                messages.back()["role"] == "assistant" && messages.back()["content"] == "" &&
                                !messages.back().contains("tool_calls");
    if (after_thinking)
        messages.back()["content"] = text;
    else
        messages.push_back({{"role", role}, {"content", text}});
}

ordered_json chat_tools(const ordered_json& tools) {
    ordered_json out = ordered_json::array();
    for (size_t i = 0; i < tools.size(); ++i) {
        Fields tool(tools[i], fmt::format("tools[{}]", i));
        if (tool.string("type").value_or("") != "function") continue;
        ordered_json function = ordered_json::object();
        for (const char* key : {"name", "description", "parameters"})
            if (const ordered_json* value = tool.value(key)) function[key] = *value;
        out.push_back({{"type", "function"}, {"function", function}});
    }
    return out;
}

class ResponsesFormat final : public AnswerFormat {
  public:
    explicit ResponsesFormat(const GenerationRequest& request)
        : model_(request.model), id_(random_id("resp_")), created_(std::time(nullptr)) {}

    ordered_json whole(const std::vector<Choice>& choices) override {
        const Choice& c = choices.front();
        ordered_json output = ordered_json::array();
        if (!c.reasoning.empty())
            output.push_back(reasoning_item(random_id("rs_"), c.reasoning, "completed"));
        if (!c.content.empty()) output.push_back(text_item(random_id("msg_"), c.content, "completed"));
        for (const ToolCall& call : c.calls)
            output.push_back(call_item(random_id("fc_"), call, call.arguments, "completed"));
        return finished(c, output);
    }

    std::string begin() override {
        return event("response.created", {{"response", response("in_progress")}}) +
               event("response.in_progress", {{"response", response("in_progress")}});
    }

    std::string delta(int, const AnswerDelta& d) override {
        std::string out;
        if (!d.reasoning.empty()) {
            out += open(Item::reasoning);
            text_ += d.reasoning;
            out += event("response.reasoning_text.delta", at({{"content_index", 0}, {"delta", d.reasoning}}));
        }
        if (!d.content.empty()) {
            out += open(Item::text);
            text_ += d.content;
            out +=
                event("response.output_text.delta",
                      at({{"content_index", 0}, {"delta", d.content}, {"logprobs", ordered_json::array()}}));
        }
        for (const ToolCallDelta& call : d.tool_calls) out += call_events(call.call);
        return out;
    }

    std::string end(int, const Choice& all) override {
        std::string out = shut();
        const bool whole = all.outcome.end != Outcome::End::length;
        return out + event(whole ? "response.completed" : "response.incomplete",
                           {{"response", finished(all, output_)}});
    }
    std::string close(const std::vector<Choice>&) override { return {}; }
    std::string error(const ApiError& error) override {
        ordered_json failed = response("failed");
        failed["error"] = {{"code", error.code}, {"message", error.what()}};
        return event("response.failed", {{"response", failed}});
    }

  private:
    enum class Item { none, reasoning, text };

    std::string event(const char* type, const ordered_json& fields) {
        ordered_json data = {{"type", type}, {"sequence_number", sequence_++}};
        data.update(fields);
        return fmt::format("event: {}\ndata: {}\n\n", type, dump(data));
    }

    ordered_json response(const char* status) const {
        return {{"id", id_},
                {"object", "response"},
                {"created_at", created_},
                {"status", status},
                {"error", nullptr},
                {"incomplete_details", nullptr},
                {"model", model_},
                {"output", ordered_json::array()},
                {"parallel_tool_calls", true},
                {"store", false},
                {"tool_choice", "auto"},
                {"tools", ordered_json::array()},
                {"usage", nullptr}};
    }

    ordered_json finished(const Choice& c, const ordered_json& output) const {
        const bool cut = c.outcome.end == Outcome::End::length;
        ordered_json out = response(cut ? "incomplete" : "completed");
        if (cut) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
        out["output"] = output;
        const Outcome& o = c.outcome;
        out["usage"] = {{"input_tokens", o.prompt_tokens},
                        {"input_tokens_details", {{"cached_tokens", o.cached_tokens}}},
                        {"output_tokens", o.answer_tokens},
                        {"output_tokens_details", {{"reasoning_tokens", o.reasoning_tokens}}},
                        {"total_tokens", o.prompt_tokens + o.answer_tokens}};
        return out;
    }

    static ordered_json text_part(const std::string& text) {
        return {{"type", "output_text"},
                {"text", text},
                {"annotations", ordered_json::array()},
                {"logprobs", ordered_json::array()}};
    }
    static ordered_json text_item(const std::string& id, const std::string& text, const char* status) {
        const bool begun = std::string(status) == "in_progress";
        return {{"id", id},
                {"type", "message"},
                {"status", status},
                {"role", "assistant"},
                {"content", begun ? ordered_json::array() : ordered_json::array({text_part(text)})}};
    }
    static ordered_json reasoning_item(const std::string& id, const std::string& text, const char* status) {
        ordered_json content = ordered_json::array();
        if (!text.empty()) content.push_back({{"type", "reasoning_text"}, {"text", text}});
        return {{"id", id},
                {"type", "reasoning"},
                {"status", status},
                {"summary", ordered_json::array()},
                {"content", content}};
    }
    static ordered_json call_item(const std::string& id, const ToolCall& call, const std::string& arguments,
                                  const char* status) {
        return {{"id", id},           {"type", "function_call"}, {"status", status},
                {"call_id", call.id}, {"name", call.name},       {"arguments", arguments}};
    }

    ordered_json at(const ordered_json& fields) const {
        ordered_json out = {{"item_id", item_id_}, {"output_index", output_.size()}};
        out.update(fields);
        return out;
    }

    std::string open(Item kind) {
        if (open_ == kind) return {};
        std::string out = shut();
        open_ = kind;
        text_.clear();
        item_id_ = random_id(kind == Item::text ? "msg_" : "rs_");
        const ordered_json item = kind == Item::text ? text_item(item_id_, "", "in_progress")
                                                     : reasoning_item(item_id_, "", "in_progress");
        out += event("response.output_item.added", {{"output_index", output_.size()}, {"item", item}});
        const ordered_json part =
            kind == Item::text ? text_part("") : ordered_json{{"type", "reasoning_text"}, {"text", ""}};
        return out + event("response.content_part.added", at({{"content_index", 0}, {"part", part}}));
    }

    std::string shut() {
        if (open_ == Item::none) return {};
        const bool text = open_ == Item::text;
        open_ = Item::none;
        const ordered_json part =
            text ? text_part(text_) : ordered_json{{"type", "reasoning_text"}, {"text", text_}};
        std::string out =
            event(text ? "response.output_text.done" : "response.reasoning_text.done",
                  at({{"content_index", 0}, {"text", text_}, {"logprobs", ordered_json::array()}}));
        out += event("response.content_part.done", at({{"content_index", 0}, {"part", part}}));
        return out + item_done(text ? text_item(item_id_, text_, "completed")
                                    : reasoning_item(item_id_, text_, "completed"));
    }

    std::string item_done(const ordered_json& item) {
        std::string out =
            event("response.output_item.done", {{"output_index", output_.size()}, {"item", item}});
        output_.push_back(item);
        return out;
    }

    std::string call_events(const ToolCall& call) {
        std::string out = shut();
        item_id_ = random_id("fc_");
        out += event("response.output_item.added", {{"output_index", output_.size()},
                                                    {"item", call_item(item_id_, call, "", "in_progress")}});
        out += event("response.function_call_arguments.delta", at({{"delta", call.arguments}}));
        out += event("response.function_call_arguments.done",
                     at({{"arguments", call.arguments}, {"name", call.name}}));
        return out + item_done(call_item(item_id_, call, call.arguments, "completed"));
    }

    std::string model_, id_;
    std::time_t created_;
    int64_t sequence_ = 0;
    Item open_ = Item::none;
    std::string item_id_, text_;
    ordered_json output_ = ordered_json::array();
};

}  // namespace

ordered_json chat_from_responses(const ordered_json& body) {
    Fields f(body);
    f.refuse({"previous_response_id", "conversation", "prompt"});
    if (f.boolean("background").value_or(false))
        throw FieldError("background", "background is not supported", "unsupported_parameter");
    ordered_json out = ordered_json::object(), messages = ordered_json::array();
    if (const auto text = f.string("instructions"))
        messages.push_back({{"role", "system"}, {"content", *text}});
    const ordered_json* input = f.value("input");
    if (input == nullptr) throw FieldError("input", "input is missing");
    if (input->is_string())
        messages.push_back({{"role", "user"}, {"content", *input}});
    else if (input->is_array())
        for (size_t i = 0; i < input->size(); ++i)
            add_item((*input)[i], fmt::format("input[{}]", i), messages);
    else
        throw FieldError("input", "input must be a text or a list of items");
    out["messages"] = messages;
    if (const ordered_json* tools = f.list("tools")) {
        const ordered_json usable = chat_tools(*tools);
        if (!usable.empty()) out["tools"] = usable;
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
                             "metadata", "user"})
        if (const ordered_json* value = f.value(same)) out[same] = *value;
    f.ignore({"store", "include", "truncation", "service_tier", "prompt_cache_key", "safety_identifier",
              "stream_options", "max_tool_calls", "top_logprobs", "client_metadata", "background"});
    for (const std::string& name : f.unknown()) out[name] = body[name];
    return out;
}

std::unique_ptr<AnswerFormat> responses_format(const GenerationRequest& request) {
    return std::make_unique<ResponsesFormat>(request);
}

}  // namespace quern
