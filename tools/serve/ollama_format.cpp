// Ollama's API: its requests as chat requests, and answers as lines of JSON.
#include <fmt/format.h>

#include <ctime>

#include "tools/common/content_parts.h"
#include "tools/serve/other_formats.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

/// Options that have the same meaning here, maybe under another name.
constexpr std::pair<const char*, const char*> kOptions[] = {{"temperature", "temperature"},
                                                            {"top_k", "top_k"},
                                                            {"top_p", "top_p"},
                                                            {"min_p", "min_p"},
                                                            {"seed", "seed"},
                                                            {"stop", "stop"},
                                                            {"repeat_penalty", "repeat_penalty"},
                                                            {"repeat_last_n", "repeat_last_n"},
                                                            {"presence_penalty", "presence_penalty"},
                                                            {"frequency_penalty", "frequency_penalty"}};

void read_options(const ordered_json& options, ordered_json& out, std::vector<std::string>& dropped) {
    Fields f(options, "options");
    for (const auto& [theirs, ours] : kOptions)
        if (const ordered_json* value = f.value(theirs)) out[ours] = *value;
    if (const auto n = f.integer("num_predict", INT32_MIN, INT32_MAX)) out["max_tokens"] = *n < 0 ? -1 : *n;
    for (const std::string& name : f.unknown()) dropped.push_back("options." + name);
}

void read_format(const ordered_json& format, ordered_json& out) {
    if (format == "json")
        out["response_format"] = {{"type", "json_object"}};
    else if (format.is_object())
        out["response_format"] = {{"type", "json_schema"},
                                  {"json_schema", {{"name", "format"}, {"schema", format}}}};
    else if (format != "")
        throw wrong_value("format", "\"json\" or a JSON schema", format);
}

/// Pictures have a field of their own.
ordered_json content_of(const std::string& text, const ordered_json* images) {
    if (images == nullptr || images->empty()) return text;
    ordered_json parts = ordered_json::array();
    for (const ordered_json& image : *images)
        parts.push_back({{"type", "image"}, {"source", {{"type", "base64"}, {"data", image}}}});
    parts.push_back({{"type", "text"}, {"text", text}});
    return parts;
}

ordered_json chat_message(const ordered_json& message, const std::string& where) {
    Fields f(message, where);
    ordered_json out = {{"role", f.string("role").value_or("")}};
    const auto text = f.string("content");
    if (const ordered_json* images = f.list("images"); text || images != nullptr)
        out["content"] = content_of(text.value_or(""), images);
    if (const auto thinking = f.string("thinking")) out["reasoning_content"] = *thinking;
    const ordered_json* calls = f.list("tool_calls");
    for (size_t i = 0; calls != nullptr && i < calls->size(); ++i) {
        Fields call((*calls)[i], fmt::format("{}.tool_calls[{}]", where, i));
        const ordered_json* function = call.object("function");
        if (function == nullptr)
            throw FieldError(call.full("function"), call.full("function") + " is missing");
        Fields inner(*function, call.full("function"));
        const ordered_json* arguments = inner.value("arguments");
        out["tool_calls"].push_back({{"id", call.string("id").value_or("")},
                                     {"type", "function"},
                                     {"function",
                                      {{"name", inner.string("name").value_or("")},
                                       {"arguments", arguments != nullptr ? dump(*arguments) : "{}"}}}});
    }
    return out;
}

void read_shared(Fields& f, ordered_json& out, std::vector<std::string>& dropped) {
    std::string model = f.string("model").value_or("");
    constexpr std::string_view kLatest = ":latest";
    if (model.ends_with(kLatest)) model.resize(model.size() - kLatest.size());
    out["model"] = model;
    out["stream"] = f.boolean("stream").value_or(true);
    if (const ordered_json* options = f.object("options")) read_options(*options, out, dropped);
    if (const ordered_json* format = f.value("format")) read_format(*format, out);
    if (const ordered_json* think = f.value("think")) {
        if (think->is_string())
            out["reasoning_effort"] = *think;
        else
            out["enable_thinking"] = *think;
    }
    f.ignore({"keep_alive"});
    for (const char* same : {"tools", "logprobs", "top_logprobs"})
        if (const ordered_json* value = f.value(same)) out[same] = *value;
}

ChatBody finished(Fields& f, ordered_json out, std::vector<std::string> dropped) {
    ChatBody chat = chat_body(std::move(out));
    chat.dropped.insert(chat.dropped.end(), dropped.begin(), dropped.end());
    chat.names = {{"max_tokens", "options.num_predict"},
                  {"reasoning_effort", "think"},
                  {"enable_thinking", "think"},
                  {"response_format.json_schema.schema", "format"}};
    for (const auto& [theirs, ours] : kOptions) chat.names[ours] = std::string("options.") + theirs;
    for (const std::string& name : f.unknown()) chat.dropped.push_back(name);
    return chat;
}

std::string time_now() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    char text[32];
    const size_t n = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &parts));
    return {text, n};
}

class OllamaFormat final : public AnswerFormat {
  public:
    OllamaFormat(bool chat, const GenerationRequest& request) : chat_(chat), model_(request.model) {}

    const char* stream_type() const override { return "application/x-ndjson"; }

    ordered_json whole(const std::vector<Choice>& choices) override {
        const Choice& c = choices.front();
        AnswerDelta all;
        all.reasoning = c.reasoning;
        all.content = c.content;
        for (const ToolCall& call : c.calls) all.tool_calls.push_back({0, call});
        ordered_json out = part(all);
        finish(out, c);
        return out;
    }
    std::string begin() override { return {}; }
    std::string delta(int, const AnswerDelta& d) override {
        if (d.reasoning.empty() && d.content.empty() && d.tool_calls.empty()) return {};
        return line(part(d));
    }
    std::string end(int, const Choice& all) override {
        ordered_json out = part({});
        finish(out, all);
        return line(out);
    }
    std::string close(const std::vector<Choice>&) override { return {}; }
    std::string ping() override { return line(part({})); }
    std::string error(const ApiError& error) override { return line(error.json(ErrorForm::ollama)); }

  private:
    static std::string line(const ordered_json& value) { return dump(value) + "\n"; }

    ordered_json part(const AnswerDelta& d) const {
        ordered_json out = {{"model", model_}, {"created_at", time_now()}};
        if (!chat_) {
            out["response"] = d.content;
            if (!d.reasoning.empty()) out["thinking"] = d.reasoning;
        } else {
            ordered_json message = {{"role", "assistant"}, {"content", d.content}};
            if (!d.reasoning.empty()) message["thinking"] = d.reasoning;
            for (const ToolCallDelta& call : d.tool_calls)
                message["tool_calls"].push_back(call_json(call.call));
            out["message"] = std::move(message);
        }
        out["done"] = false;
        return out;
    }

    static ordered_json call_json(const ToolCall& call) {
        ordered_json arguments = ordered_json::parse(call.arguments, nullptr, false);
        if (!arguments.is_object()) arguments = ordered_json::object();
        return {{"id", call.id}, {"function", {{"name", call.name}, {"arguments", arguments}}}};
    }

    static void finish(ordered_json& out, const Choice& c) {
        const Outcome& o = c.outcome;
        const auto nanoseconds = [](double seconds) { return static_cast<int64_t>(seconds * 1e9); };
        out["done"] = true;
        out["done_reason"] = o.end == Outcome::End::length ? "length" : "stop";
        out["total_duration"] =
            nanoseconds(o.timing.queue_seconds + o.timing.prefill_seconds + o.timing.decode_seconds);
        out["load_duration"] = 0;
        out["prompt_eval_count"] = o.prompt_tokens;
        out["prompt_eval_duration"] = nanoseconds(o.timing.prefill_seconds);
        out["eval_count"] = o.answer_tokens;
        out["eval_duration"] = nanoseconds(o.timing.decode_seconds);
    }

    bool chat_;
    std::string model_;
};

}  // namespace

ordered_json ollama_loaded(const ordered_json& body, bool chat) {
    ordered_json out = {{"model", text_of(body, "model")}, {"created_at", time_now()}};
    if (chat)
        out["message"] = {{"role", "assistant"}, {"content", ""}};
    else
        out["response"] = "";
    out["done"] = true;
    out["done_reason"] = "load";
    return out;
}

ChatBody chat_from_ollama(const ordered_json& body) {
    Fields f(body);
    ordered_json out = ordered_json::object(), messages = ordered_json::array();
    std::vector<std::string> dropped;
    const ordered_json* list = f.list("messages");
    for (size_t i = 0; list != nullptr && i < list->size(); ++i)
        messages.push_back(chat_message((*list)[i], fmt::format("messages[{}]", i)));
    out["messages"] = std::move(messages);
    read_shared(f, out, dropped);
    return finished(f, std::move(out), std::move(dropped));
}

ChatBody chat_from_ollama_prompt(const ordered_json& body) {
    Fields f(body);
    ordered_json out = ordered_json::object();
    std::vector<std::string> dropped;
    const std::string prompt = f.string("prompt").value_or("");
    if (const auto suffix = f.string("suffix"); suffix && !suffix->empty()) {
        out["input_prefix"] = prompt;
        out["input_suffix"] = *suffix;
    } else if (f.boolean("raw").value_or(false)) {
        out["prompt"] = prompt;
    } else {
        out["messages"] = ordered_json::array();
        if (const auto system = f.string("system"); system && !system->empty())
            out["messages"].push_back({{"role", "system"}, {"content", *system}});
        out["messages"].push_back({{"role", "user"}, {"content", content_of(prompt, f.list("images"))}});
    }
    read_shared(f, out, dropped);
    if (!out.contains("messages"))
        for (const char* name : {"enable_thinking", "reasoning_effort", "tools"}) out.erase(name);
    return finished(f, std::move(out), std::move(dropped));
}

std::unique_ptr<AnswerFormat> ollama_format(bool chat, const GenerationRequest& request) {
    return std::make_unique<OllamaFormat>(chat, request);
}

}  // namespace quern
