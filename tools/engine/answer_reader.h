// AnswerReader: from the tokens of an answer to thinking, content and tool calls; decides which tokens may come next.
//
// Joins decoder and parser, ends the answer where its rules say so, and steers generation through the hooks
// of Request: closes thinking that used up its budget, begins a call that was demanded, refuses tokens that a
// grammar or a rule forbids. Each answer has its own reader, used by the thread that owns the engine.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "models/chat_format.h"
#include "models/tokenizer.h"
#include "tools/engine/grammar.h"
#include "tools/engine/request.h"

namespace quern {

class Model;

struct AnswerRules {
    enum class Calls { free, none, required };

    bool chat = true;                     // false: plain text, without thinking and calls
    bool thinking_open = false;           // RenderedPrompt::thinking_open
    nlohmann::ordered_json tools;         // as for ChatFormat::render
    Calls calls = Calls::free;            // without tools the same as none
    std::vector<std::string> call_names;  // the tools that may be called; empty: all
    bool parallel_calls = true;           // false: the answer ends after one call
    int64_t thinking_budget = -1;         // tokens; then the thinking is closed for the model. -1: none
    std::vector<std::string> stops;  // end the content where one of them would begin; never inside thinking
    std::shared_ptr<const Grammar> grammar;       // what the content must be
    std::shared_ptr<const Grammar> call_grammar;  // of the tools; made by the reader if it is not here
    /// Alternatives to report beside each token of the content, which the reported tokens join to; -1: no report.
    int top_logprobs = -1;
    bool prompt_logprobs = false;  // plain text: the report begins with the prompt
};

struct TokenLogprob {
    int32_t id;
    std::optional<double> logprob;  // none for the first token of a prompt: nothing comes before it
    std::vector<std::pair<int32_t, double>> top;  // likeliest first
};

struct AnswerDelta : ChatDelta {
    std::vector<TokenLogprob> logprobs;

    bool empty() const { return ChatDelta::empty() && logprobs.empty(); }
};

/// Looks for stop texts in a stream; holds back what may become one.
class StopFinder {
  public:
    explicit StopFinder(std::vector<std::string> stops) : stops_(std::move(stops)) {}
    /// The part of the text that is certainly before any stop.
    std::string push(std::string_view text);
    std::string flush();
    const std::optional<std::string>& found() const { return found_; }

  private:
    std::vector<std::string> stops_;
    std::string held_;
    std::optional<std::string> found_;
};

class AnswerReader {
  public:
    /// `model`, which must have a tokenizer, must outlive the reader.
    AnswerReader(const Model& model, AnswerRules rules);

    /// The tokens that the answer must begin with, to be added to the prompt. Call once, before attach.
    std::vector<int32_t> opening();
    /// Sets the hooks of `request`. `deliver` gets what is new and returns whether to go on. The reader must outlive
    /// the request.
    void attach(Request& request, std::function<bool(const AnswerDelta&)> deliver);
    /// What was held back. Call once, at the end of generation.
    AnswerDelta finish(FinishReason reason);

    /// From any thread: the thinking is closed at the next token.
    void end_thinking() { end_thinking_ = true; }

    const Message& message() const { return parser_->message(); }
    /// The content as delivered: ends before the stop text.
    const std::string& content() const { return content_; }
    /// Whether a rule ended it: a stop text, the one call that was allowed, a complete document.
    bool ended() const { return ended_; }
    const std::optional<std::string>& stop_text() const { return stop_.found(); }
    int64_t tokens() const { return tokens_; }
    int64_t reasoning_tokens() const { return reasoning_tokens_; }

  private:
    bool push(int32_t id, const std::function<bool(const AnswerDelta&)>& deliver);
    AnswerDelta read(const ChatDelta& parsed);
    void take_reports(AnswerDelta& out);
    ChatDelta parse(std::string_view text);
    std::string call_prefix();
    std::vector<int32_t> forced();
    bool allows(int32_t id) const;
    const GrammarMatcher* ruling() const;
    void narrow(std::span<float> logits) const;
    bool allows_in_call(int32_t id) const;
    bool allows_after_call(int32_t id) const;
    void follow_call(int32_t id);
    void follow_name(int32_t id);
    size_t copies(std::span<const int32_t> tokens) const;
    TokenLogprob report(int32_t id, std::span<const float> logits) const;
    void note_prompt(Request& request);

    const Tokenizer& tokenizer_;
    const ChatFormat& format_;
    AnswerRules rules_;
    std::vector<int32_t> stop_ids_;
    std::optional<int32_t> call_id_;  // of the marker that begins a call
    std::unique_ptr<ChatParser> parser_;
    StreamDecoder decoder_;
    StopFinder stop_;
    GrammarMatcher matcher_;
    std::string content_;
    std::vector<TokenLogprob> logprobs_;
    std::string reported_ahead_;  // text of the last reported token that is still held back
    std::vector<std::string> names_;
    std::optional<GrammarMatcher> call_;  // from the marker of a block of calls to its end
    std::optional<std::string> naming_;  // from the marker of any call to the end of its name: the text since
    size_t calls_ = 0;
    size_t forced_left_ = 0;  // tokens still to come that were not the model's choice
    bool call_begun_ = false, ended_ = false;
    std::atomic<bool> end_thinking_ = false;
    bool call_in_thinking_ = false;  // the call that is open was begun there
    bool feed_after_call_ = false;   // a line feed follows the calls
    bool just_closed_ = false;       // the last token ended the thinking
    bool matching_ = false;          // the content has begun and the grammar rules it
    int64_t tokens_ = 0, reasoning_tokens_ = 0;
};

}  // namespace quern
