#include "tools/engine/chat_session.h"

#include <utility>

#include "ggml-like/check.h"
#include "models/model.h"
#include "tools/engine/defaults.h"

namespace quern {
namespace {

const Tokenizer& tokenizer_of(const Engine& engine) {
    const Tokenizer* tokenizer = engine.model().tokenizer();
    if (tokenizer == nullptr) FAIL(usage, "chat needs a tokenizer; the model was loaded for token ids only");
    return *tokenizer;
}

// How the model itself ends its thinking: a line with the tag, and an empty line.
std::vector<int32_t> closing_ids(const Tokenizer& tokenizer) {
    std::vector<int32_t> out = tokenizer.encode("\n", Tokenizer::Markers::literal);
    const auto tag = tokenizer.encode("</think>", Tokenizer::Markers::control);
    const auto line = tokenizer.encode("\n\n", Tokenizer::Markers::literal);
    out.insert(out.end(), tag.begin(), tag.end());
    out.insert(out.end(), line.begin(), line.end());
    return out;
}

}  // namespace

const char* ChatAnswer::finish_reason() const {
    switch (reason) {
        case FinishReason::length:
            return "length";
        case FinishReason::cancelled:
            return "cancelled";
        case FinishReason::error:
            return "error";
        default:
            return message.tool_calls.empty() ? "stop" : "tool_calls";
    }
}

ChatSession::ChatSession(Engine& engine, std::span<const Message> messages, const ChatSettings& settings,
                         ChatEvents events)
    : engine_(engine),
      settings_(settings),
      events_(std::move(events)),
      decoder_(tokenizer_of(engine), /*skip_special=*/true) {
    if (settings_.reasoning_budget == 0) settings_.format.thinking = false;
    const RenderedPrompt prompt = render_chat(messages, settings_.tools, settings_.format);
    ids_ = encode_prompt(prompt, tokenizer_of(engine));
    prompt_size_ = ids_.size();
    parser_ = std::make_unique<ChatParser>(prompt.thinking_open, settings_.tools);
    submit();
    answer_.prompt_tokens = static_cast<int64_t>(prompt_size_);
}

ChatSession::~ChatSession() {
    if (running_) engine_.cancel(request_);
}

void ChatSession::submit() {
    Request request;
    request.prompt = ids_;
    request.sampling = settings_.sampling;
    request.max_tokens = settings_.max_tokens - answer_.answer_tokens;
    if (!settings_.ignore_eos) request.stop_ids = default_stop_ids(engine_.model());
    request.on_token = [arrived = arrived_](int32_t id) {
        arrived->ids.push_back(id);
        return true;
    };
    request.on_prefill = [arrived = arrived_](int64_t done) { arrived->prefill = done; };
    request_ = engine_.submit(std::move(request));
    running_ = true;
}

bool ChatSession::poll() {
    if (done_) return false;
    if (arrived_->prefill > 0 && answer_.answer_tokens == 0 && events_.on_prefill) {
        events_.on_prefill(arrived_->prefill, answer_.prompt_tokens);
    }
    arrived_->prefill = 0;
    for (int32_t id : std::exchange(arrived_->ids, {})) {
        if (!closing_) handle(id);
    }
    if (!engine_.finished(request_)) return true;
    const Result result = engine_.take(request_);
    running_ = false;
    collect(result);
    // The last token of an answer may also be the last of the budget.
    if (closing_ && result.reason == FinishReason::cancelled) {
        close_thinking();
        return !done_;
    }
    finish(result.reason, result.error);
    return false;
}

void ChatSession::handle(int32_t id) {
    ids_.push_back(id);
    ++answer_.answer_tokens;
    if (parser_->in_reasoning()) ++answer_.reasoning_tokens;
    emit(parser_->push(decoder_.push(id)));
    if (over_budget()) {
        closing_ = true;
        engine_.cancel(request_);
    }
}

bool ChatSession::over_budget() const {
    return settings_.reasoning_budget > 0 && !answer_.budget_reached && parser_->in_reasoning() &&
           answer_.reasoning_tokens >= settings_.reasoning_budget;
}

void ChatSession::emit(const ChatDelta& delta) {
    if (!delta.reasoning.empty() && events_.on_reasoning) events_.on_reasoning(delta.reasoning);
    if (!delta.content.empty() && events_.on_content) events_.on_content(delta.content);
    if (!events_.on_tool_call) return;
    for (const ToolCallDelta& call : delta.tool_calls) {
        events_.on_tool_call(parser_->message().tool_calls.at(static_cast<size_t>(call.index)));
    }
}

void ChatSession::collect(const Result& result) {
    // What a continuation recomputes is time of the answer, not of the prompt.
    const bool first = !answer_.budget_reached;
    Timing& sum = answer_.timing;
    if (first) {
        sum = result.timing;
    } else {
        sum.decode_seconds += result.timing.prefill_seconds + result.timing.decode_seconds;
    }
}

void ChatSession::close_thinking() {
    closing_ = false;
    answer_.budget_reached = true;
    const Tokenizer& tokenizer = tokenizer_of(engine_);
    emit(parser_->push(decoder_.flush() + "\n</think>\n\n"));
    const std::vector<int32_t> closing = closing_ids(tokenizer);
    ids_.insert(ids_.end(), closing.begin(), closing.end());
    if (answer_.answer_tokens >= settings_.max_tokens) return finish(FinishReason::length, "");
    try {
        submit();
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::too_long) throw;
        finish(FinishReason::length, "");
    }
}

void ChatSession::finish(FinishReason reason, std::string error) {
    emit(parser_->push(decoder_.flush()));
    emit(parser_->finish());
    answer_.message = parser_->message();
    answer_.message.role = "assistant";
    answer_.reason = reason;
    answer_.error = std::move(error);
    done_ = true;
}

void ChatSession::cancel() {
    if (!running_) return;
    // A cancel for the budget that is still under way must not be taken for the user's, nor the other way.
    closing_ = false;
    settings_.reasoning_budget = -1;
    engine_.cancel(request_);
}

ChatAnswer ChatSession::run(const std::function<bool()>& keep_going) {
    bool asked = false;
    while (poll()) {
        if (!asked && keep_going && !keep_going()) {
            asked = true;
            cancel();
        }
        engine_.step();
    }
    return take();
}

}  // namespace quern
