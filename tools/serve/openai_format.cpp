// Answers in the form of /v1/chat/completions and /v1/completions.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <random>
#include <utility>

#include "tools/serve/answer_format.h"

namespace quern {

using nlohmann::ordered_json;

void Choice::add(const AnswerDelta& delta) {
    reasoning += delta.reasoning;
    content += delta.content;
    for (const ToolCallDelta& call : delta.tool_calls) calls.push_back(call.call);
    logprobs.insert(logprobs.end(), delta.logprobs.begin(), delta.logprobs.end());
}

const char* Choice::finish_reason() const {
    if (outcome.end == Outcome::End::length) return "length";
    return calls.empty() ? "stop" : "tool_calls";
}

std::string random_id(const std::string& prefix) {
    thread_local std::mt19937_64 random(std::random_device{}());
    return fmt::format("{}{:016x}{:08x}", prefix, random(), static_cast<uint32_t>(random()));
}

ordered_json usage_json(const std::vector<Choice>& choices, size_t each) {
    int64_t prompt = 0, cached = 0, answer = 0, reasoning = 0, drafted = 0, accepted = 0;
    for (size_t i = 0; i < choices.size(); ++i) {
        const Outcome& o = choices[i].outcome;
        answer += o.answer_tokens;
        reasoning += o.reasoning_tokens;
        drafted += o.drafted;
        accepted += o.accepted;
        if (i % each != 0) continue;
        prompt += o.prompt_tokens;
        cached += o.cached_tokens;
    }
    ordered_json details = {{"reasoning_tokens", reasoning}};
    if (drafted > 0) {
        details["accepted_prediction_tokens"] = accepted;
        details["rejected_prediction_tokens"] = drafted - accepted;
    }
    return {{"prompt_tokens", prompt},
            {"completion_tokens", answer},
            {"total_tokens", prompt + answer},
            {"prompt_tokens_details", {{"cached_tokens", cached}}},
            {"completion_tokens_details", details}};
}

ordered_json timings_json(const Progress& o) {
    const int64_t computed = o.prompt_tokens - o.cached_tokens,
                  decoded = std::max<int64_t>(o.answer_tokens - 1, 0);
    const auto rate = [](int64_t n, double s) { return s > 0 ? static_cast<double>(n) / s : 0.0; };
    ordered_json out = {{"cache_n", o.cached_tokens},
                        {"prompt_n", computed},
                        {"prompt_ms", o.timing.prefill_seconds * 1e3},
                        {"prompt_per_second", rate(computed, o.timing.prefill_seconds)},
                        {"predicted_n", o.answer_tokens},
                        {"predicted_ms", o.timing.decode_seconds * 1e3},
                        {"predicted_per_second", rate(decoded, o.timing.decode_seconds)}};
    if (o.drafted > 0) {
        out["draft_n"] = o.drafted;
        out["draft_n_accepted"] = o.accepted;
    }
    return out;
}

namespace {

ordered_json call_json(const ToolCall& call, const ToolKinds& kinds) {
    if (kinds.custom.contains(call.name))
        return {{"id", call.id},
                {"type", "custom"},
                {"custom", {{"name", call.name}, {"input", custom_input(call.arguments)}}}};
    return {{"id", call.id},
            {"type", "function"},
            {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
}

/// The beginning of a call, without its arguments.
ordered_json call_head(const ToolCallPiece& piece, bool custom) {
    return custom ? ordered_json{{"index", piece.index},
                                 {"id", piece.id},
                                 {"type", "custom"},
                                 {"custom", {{"name", piece.name}, {"input", ""}}}}
                  : ordered_json{{"index", piece.index},
                                 {"id", piece.id},
                                 {"type", "function"},
                                 {"function", {{"name", piece.name}, {"arguments", ""}}}};
}

class OpenAiFormat final : public AnswerFormat {
  public:
    OpenAiFormat(bool chat, const GenerationRequest& request, const Tokenizer& tokenizer)
        : chat_(chat),
          usage_(request.include_usage),
          return_progress_(request.return_progress),
          timings_per_token_(request.timings_per_token),
          echo_(request.echo),
          kinds_(request.kinds),
          model_(request.model),
          tokenizer_(tokenizer),
          id_(random_id(chat ? "chatcmpl-" : "cmpl-")),
          created_(std::time(nullptr)),
          each_(static_cast<size_t>(request.choices)),
          states_(static_cast<size_t>(request.answers())) {}

    ordered_json whole(const std::vector<Choice>& choices) override {
        ordered_json out = frame(chat_ ? "chat.completion" : "text_completion");
        out["choices"] = ordered_json::array();
        for (size_t i = 0; i < choices.size(); ++i) {
            const Choice& c = choices[i];
            ordered_json one = {{"index", i}};
            if (chat_)
                one["message"] = message(c);
            else
                one["text"] = echo(i) + c.content;
            one["logprobs"] = logprobs(i, c.logprobs);
            one["finish_reason"] = finish_reason(c);
            out["choices"].push_back(std::move(one));
        }
        out["usage"] = usage_json(choices, each_);
        out["timings"] = timings_json(choices.front().outcome);
        return out;
    }

    std::string id() const override { return id_; }
    std::string begin() override {
        std::string out;
        for (size_t i = 0; i < states_.size(); ++i) {
            if (chat_) out += chunk(i, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr);
            if (!echo_.empty()) out += chunk(i, echo(i), nullptr, nullptr);
        }
        return out;
    }

    std::string delta(int choice, const AnswerDelta& d) override {
        const auto i = static_cast<size_t>(choice);
        std::string out;
        if (!chat_) return d.empty() ? out : chunk(i, d.content, logprobs(i, d.logprobs), nullptr);
        if (!d.reasoning.empty())
            out +=
                chunk(i, {{"reasoning_content", d.reasoning}, {"reasoning", d.reasoning}}, nullptr, nullptr);
        if (!d.content.empty()) out += chunk(i, {{"content", d.content}}, logprobs(i, d.logprobs), nullptr);
        for (const ToolCallPiece& piece : d.call_pieces) out += call_chunks(i, piece);
        return out;
    }

    std::string progress(int i, const Progress& p) override {
        if (timings_per_token_ && p.answer_tokens > 0) timings_ = timings_json(p);
        if (!return_progress_ || p.answer_tokens > 0) return {};
        ordered_json out =
            open_chunk(static_cast<size_t>(i), chat_ ? ordered_json::object() : ordered_json(""));
        out["prompt_progress"] = {{"total", p.prompt_tokens},
                                  {"cache", p.cached_tokens},
                                  {"processed", p.prompt_done},
                                  {"time_ms", p.timing.prefill_seconds * 1e3}};
        return "data: " + dump(out) + "\n\n";
    }

    std::string end(int i, const Choice& all) override {
        timings_ = timings_json(all.outcome);
        return chunk(static_cast<size_t>(i), chat_ ? ordered_json::object() : ordered_json(""), nullptr,
                     finish_reason(all));
    }

    std::string close(const std::vector<Choice>& choices) override {
        std::string out;
        if (usage_) {
            ordered_json last = frame(chunk_name());
            last["choices"] = ordered_json::array();
            last["usage"] = usage_json(choices, each_);
            out += "data: " + dump(last) + "\n\n";
        }
        return out + "data: [DONE]\n\n";
    }

  private:
    const char* chunk_name() const { return chat_ ? "chat.completion.chunk" : "text_completion"; }

    ordered_json frame(const char* object) const {
        return {{"id", id_},
                {"object", object},
                {"created", created_},
                {"model", model_},
                {"system_fingerprint", "quern-" QUERN_VERSION}};
    }

    /// A chunk of one choice, with nothing of its end yet.
    ordered_json open_chunk(size_t i, const ordered_json& delta) const {
        ordered_json out = frame(chunk_name());
        out["choices"] = ordered_json::array({{{"index", i},
                                               {chat_ ? "delta" : "text", delta},
                                               {"logprobs", nullptr},
                                               {"finish_reason", nullptr}}});
        if (usage_) out["usage"] = nullptr;
        return out;
    }

    /// Takes the timings that were noted with it.
    std::string chunk(size_t i, const ordered_json& delta, const ordered_json& logprobs, const char* finish) {
        ordered_json out = open_chunk(i, delta);
        out["choices"][0]["logprobs"] = logprobs;
        if (finish != nullptr) out["choices"][0]["finish_reason"] = finish;
        if (!timings_.is_null()) out["timings"] = std::exchange(timings_, nullptr);
        return "data: " + dump(out) + "\n\n";
    }

    const char* finish_reason(const Choice& c) const {
        const bool call = kinds_.legacy && c.outcome.end != Outcome::End::length && !c.calls.empty();
        return call ? "function_call" : c.finish_reason();
    }

    /// A piece of the one call that an answer with functions has.
    std::string function_chunk(size_t i, const ToolCallPiece& piece) {
        ordered_json call = {{"arguments", piece.arguments}};
        if (!piece.name.empty()) call["name"] = piece.name;
        return piece.index > 0 ? "" : chunk(i, {{"function_call", call}}, nullptr, nullptr);
    }

    std::string call_chunks(size_t i, const ToolCallPiece& piece) {
        if (kinds_.legacy) return function_chunk(i, piece);
        const auto one = [&](const ordered_json& call) {
            return chunk(i, {{"tool_calls", ordered_json::array({call})}}, nullptr, nullptr);
        };
        std::string out;
        if (!piece.name.empty()) {
            states_[i].custom = kinds_.custom.contains(piece.name);
            out = one(call_head(piece, states_[i].custom));
        }
        if (!states_[i].custom)
            out += one({{"index", piece.index}, {"function", {{"arguments", piece.arguments}}}});
        else if (!piece.text.empty())
            out += one({{"index", piece.index}, {"custom", {{"input", piece.text}}}});
        return out;
    }

    ordered_json message(const Choice& c) const {
        ordered_json m = {{"role", "assistant"}, {"content", c.content}};
        if (!c.reasoning.empty()) m["reasoning_content"] = m["reasoning"] = c.reasoning;
        if (kinds_.legacy && !c.calls.empty()) {
            m["content"] = c.content.empty() ? ordered_json() : ordered_json(c.content);
            m["function_call"] = {{"name", c.calls[0].name}, {"arguments", c.calls[0].arguments}};
            return m;
        }
        for (const ToolCall& call : c.calls) m["tool_calls"].push_back(call_json(call, kinds_));
        return m;
    }

    std::string echo(size_t choice) const { return echo_.empty() ? std::string() : echo_[choice / each_]; }

    ordered_json token_json(int32_t id, double logprob) const {
        const std::string_view piece = tokenizer_.piece(id);
        ordered_json bytes = ordered_json::array();
        for (const char b : piece) bytes.push_back(static_cast<unsigned char>(b));
        return {{"token", piece}, {"logprob", logprob}, {"bytes", bytes}};
    }

    ordered_json logprobs(size_t choice, const std::vector<TokenLogprob>& reports) {
        if (reports.empty()) return nullptr;
        if (!chat_) return old_logprobs(states_[choice].offset, reports);
        ordered_json content = ordered_json::array();
        for (const TokenLogprob& r : reports) {
            ordered_json one = token_json(r.id, *r.logprob);
            one["top_logprobs"] = ordered_json::array();
            for (const auto& [id, logprob] : r.top) one["top_logprobs"].push_back(token_json(id, logprob));
            content.push_back(std::move(one));
        }
        return {{"content", content}, {"refusal", nullptr}};
    }

    /// `offset`: characters of the text up to here.
    ordered_json old_logprobs(int64_t& offset, const std::vector<TokenLogprob>& reports) const {
        ordered_json tokens = ordered_json::array(), values = tokens, tops = tokens, offsets = tokens;
        for (const TokenLogprob& r : reports) {
            const std::string_view piece = tokenizer_.piece(r.id);
            tokens.push_back(piece);
            values.push_back(r.logprob ? ordered_json(*r.logprob) : ordered_json());
            ordered_json top = r.logprob ? ordered_json::object() : ordered_json();
            for (const auto& [id, logprob] : r.top) top[std::string(tokenizer_.piece(id))] = logprob;
            tops.push_back(std::move(top));
            offsets.push_back(offset);
            offset += std::count_if(piece.begin(), piece.end(), [](char c) { return (c & 0xc0) != 0x80; });
        }
        return {
            {"tokens", tokens}, {"token_logprobs", values}, {"top_logprobs", tops}, {"text_offset", offsets}};
    }

    bool chat_, usage_, return_progress_, timings_per_token_;
    ordered_json timings_;           // for the next chunk
    std::vector<std::string> echo_;  // by prompt; or empty
    ToolKinds kinds_;
    std::string model_;
    const Tokenizer& tokenizer_;
    std::string id_;
    std::time_t created_;
    size_t each_;  // choices of one prompt
    struct State {
        bool custom = false;  // the call that is being written is one of free text
        int64_t offset = 0;   // of the next token that is reported, in characters
    };
    std::vector<State> states_;  // by choice
};

}  // namespace

std::unique_ptr<AnswerFormat> openai_format(bool chat, const GenerationRequest& request,
                                            const Tokenizer& tokenizer) {
    return std::make_unique<OpenAiFormat>(chat, request, tokenizer);
}

}  // namespace quern
