// /v1/responses of the OpenAI API.
#include <fmt/format.h>

#include <ctime>
#include <optional>

#include "tools/serve/other_formats.h"
#include "tools/serve/sampling_fields.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

/// Fields of the request that the response repeats.
ordered_json repeated(const GenerationRequest& request, const ordered_json& body) {
    ordered_json out = {{"instructions", nullptr},
                        {"max_output_tokens", nullptr},
                        {"metadata", ordered_json::object()},
                        {"parallel_tool_calls", true},
                        {"previous_response_id", nullptr},
                        {"prompt_cache_key", nullptr},
                        {"reasoning", nullptr},
                        {"service_tier", "default"},
                        {"store", true},
                        {"temperature", as_written(request.sampling.temperature)},
                        {"text", {{"format", {{"type", "text"}}}}},
                        {"tool_choice", "auto"},
                        {"tools", ordered_json::array()},
                        {"top_p", as_written(request.sampling.top_p)},
                        {"truncation", "disabled"},
                        {"user", nullptr}};
    for (const auto& [name, value] : out.items())
        if (const auto given = body.find(name); given != body.end() && !given->is_null()) value = *given;
    return out;
}

class ResponsesFormat final : public AnswerFormat {
  public:
    ResponsesFormat(const GenerationRequest& request, const ordered_json& body,
                    std::function<void(const ordered_json&)> keep)
        : model_(request.model),
          kinds_(request.kinds),
          repeated_(repeated(request, body)),
          keep_(std::move(keep)),
          id_(random_id("resp_")),
          created_(std::time(nullptr)) {}

    ordered_json whole(const std::vector<Choice>& choices) override {
        const Choice& c = choices.front();
        ordered_json output = ordered_json::array();
        if (!c.reasoning.empty())
            output.push_back(reasoning_item(random_id("rs_"), c.reasoning, "completed"));
        if (!c.content.empty()) output.push_back(text_item(random_id("msg_"), c.content, "completed"));
        for (const ToolCall& call : c.calls) output.push_back(call_item(call_id(call), call, "completed"));
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
        size_t done = 0;
        for (const ToolCallPiece& piece : d.call_pieces) {
            if (!piece.name.empty() && call_ && done < d.tool_calls.size())
                out += call_done(d.tool_calls[done++].call);
            out += call_piece(piece);
        }
        while (done < d.tool_calls.size()) out += call_done(d.tool_calls[done++].call);
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
        ordered_json out = {{"id", id_},
                            {"object", "response"},
                            {"created_at", created_},
                            {"status", status},
                            {"error", nullptr},
                            {"incomplete_details", nullptr},
                            {"model", model_},
                            {"output", ordered_json::array()},
                            {"usage", nullptr}};
        out.update(repeated_);
        return out;
    }

    ordered_json finished(const Choice& c, const ordered_json& output) {
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
        out["timings"] = timings_json(o);
        if (keep_) keep_(out);
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
    bool is_custom(const std::string& name) const { return kinds_.custom.contains(name); }
    std::string call_id(const ToolCall& call) const {
        return random_id(is_custom(call.name) ? "ctc_" : "fc_");
    }

    ordered_json call_item(const std::string& id, const ToolCall& call, const char* status) const {
        const bool custom = is_custom(call.name);
        ordered_json item = {{"id", id},
                             {"type", custom ? "custom_tool_call" : "function_call"},
                             {"status", status},
                             {"call_id", call.id},
                             {"name", call.name}};
        if (const auto place = kinds_.spaces.find(call.name); place != kinds_.spaces.end()) {
            item["name"] = place->second.name;
            item["namespace"] = place->second.space;
        }
        if (custom)
            item["input"] = custom_input(call.arguments);
        else
            item["arguments"] = call.arguments;
        return item;
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
        if (call_) {  // it was cut off, or turned out to be none
            const ToolCall call{call_->id, call_->name, custom_ ? custom_arguments(sent_) : sent_};
            call_.reset();
            return item_done(call_item(item_id_, call, "incomplete"));
        }
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

    std::string call_begin(const ToolCall& call) {
        std::string out = shut();
        call_ = call;
        item_id_ = call_id(call);
        sent_.clear();
        return out +
               event("response.output_item.added",
                     {{"output_index", output_.size()}, {"item", call_item(item_id_, call, "in_progress")}});
    }

    std::string call_text(const std::string& text) {
        if (text.empty()) return {};
        sent_ += text;
        return event(
            custom_ ? "response.custom_tool_call_input.delta" : "response.function_call_arguments.delta",
            at({{"delta", text}}));
    }

    std::string call_piece(const ToolCallPiece& piece) {
        std::string out;
        if (!piece.name.empty()) {
            custom_ = is_custom(piece.name);
            out = call_begin({piece.id, piece.name, ""});
        }
        return out + call_text(custom_ ? piece.text : piece.arguments);
    }

    /// All pieces of it have come.
    std::string call_done(const ToolCall& call) {
        std::string out;
        if (custom_) {
            const std::string input = custom_input(call.arguments);
            if (input.size() > sent_.size() && input.starts_with(sent_))
                out = call_text(input.substr(sent_.size()));
            out += event("response.custom_tool_call_input.done", at({{"input", input}}));
        } else {
            out = event("response.function_call_arguments.done",
                        at({{"arguments", call.arguments}, {"name", call.name}}));
        }
        call_.reset();
        return out + item_done(call_item(item_id_, call, "completed"));
    }

    std::string model_;
    ToolKinds kinds_;
    ordered_json repeated_;
    std::function<void(const ordered_json&)> keep_;
    std::string id_;
    std::time_t created_;
    int64_t sequence_ = 0;
    Item open_ = Item::none;
    std::string item_id_, text_;
    std::optional<ToolCall> call_;  // that is being written, without its arguments
    bool custom_ = false;           // it is one of free text
    std::string sent_;              // what of its arguments or input was streamed
    ordered_json output_ = ordered_json::array();
};

}  // namespace

std::unique_ptr<AnswerFormat> responses_format(const GenerationRequest& request, const ordered_json& body,
                                               std::function<void(const ordered_json&)> keep) {
    return std::make_unique<ResponsesFormat>(request, body, std::move(keep));
}

}  // namespace quern
