#include "tools/engine/chat_session.h"

#include "ggml-like/check.h"
#include "models/model.h"
#include "models/tokenizer.h"

namespace quern {
namespace {

const Tokenizer& tokenizer_of(const Engine& engine) {
    const Tokenizer* tokenizer = engine.model().tokenizer();
    CHECK(tokenizer != nullptr, "[chat] the model was loaded without its tokenizer");
    return *tokenizer;
}

/// How the thinking ends when its budget is used up.
constexpr const char* kCloseThinking = "\n</think>\n\n";

}  // namespace

struct ChatSession::Turn {
    std::vector<int32_t> prompt;
    ChatParser parser;
    StreamDecoder decoder;
    ChatAnswer answer;
    bool over_budget = false;
    bool stopped = false;  // by the caller
};

ChatSession::ChatSession(Engine& engine) : engine_(engine), tokenizer_(tokenizer_of(engine)) {}

ChatAnswer ChatSession::respond(std::span<const Message> messages, const ChatSettings& settings,
                                const ChatCallbacks& callbacks) {
    const RenderedPrompt prompt =
        render_chat(messages, settings.tools,
                    {.thinking = settings.thinking, .preserve_thinking = settings.preserve_thinking});
    Turn turn{.prompt = encode_prompt(prompt, tokenizer_),
              .parser = ChatParser(prompt.thinking_open, settings.tools),
              .decoder = StreamDecoder(tokenizer_, true),
              .answer = {}};
    generate(turn, settings, callbacks);
    if (turn.over_budget) {  // close the thinking in the model's place and let it answer
        const auto close = tokenizer_.encode(kCloseThinking, Tokenizer::Markers::control);
        turn.prompt.insert(turn.prompt.end(), close.begin(), close.end());
        deliver(turn, turn.parser.push(turn.decoder.flush() + kCloseThinking), callbacks);
        generate(turn, settings, callbacks);
    }
    deliver(turn, turn.parser.push(turn.decoder.flush()), callbacks);
    deliver(turn, turn.parser.finish(turn.answer.reason != FinishReason::stop), callbacks);
    turn.answer.message = turn.parser.message();
    return std::move(turn.answer);
}

ChatAnswer ChatSession::complete(const std::string& text, const ChatSettings& settings,
                                 const ChatCallbacks& callbacks) {
    Turn turn{.prompt = tokenizer_.encode(text, Tokenizer::Markers::control),
              .parser = ChatParser(false, {}),
              .decoder = StreamDecoder(tokenizer_, true),
              .answer = {}};
    ChatCallbacks raw = callbacks;
    generate(turn, settings, raw);
    deliver(turn, turn.parser.push(turn.decoder.flush()), callbacks);
    deliver(turn, turn.parser.finish(turn.answer.reason != FinishReason::stop), callbacks);
    turn.answer.message = turn.parser.message();
    return std::move(turn.answer);
}

/// Runs the prompt as it is now; tokens of the answer are appended to it.
void ChatSession::generate(Turn& turn, const ChatSettings& settings, const ChatCallbacks& callbacks) {
    const bool first = !turn.over_budget;
    const auto may_go_on = [&] {
        turn.stopped = turn.stopped || (callbacks.keep_going && !callbacks.keep_going());
        return !turn.stopped;
    };
    Request request;
    request.prompt = turn.prompt;
    request.sampling = settings.sampling;
    request.max_tokens = settings.max_tokens - turn.answer.answer_tokens;
    if (!settings.ignore_eos) request.stop_ids = engine_.model().generation().eos_ids;
    request.on_token = [&](int32_t id) {
        turn.prompt.push_back(id);
        ++turn.answer.answer_tokens;
        if (turn.parser.in_reasoning()) ++turn.answer.reasoning_tokens;
        deliver(turn, turn.parser.push(turn.decoder.push(id)), callbacks);
        turn.over_budget = first && settings.thinking_budget >= 0 && turn.parser.in_reasoning() &&
                           turn.answer.reasoning_tokens >= settings.thinking_budget;
        return may_go_on() && !turn.over_budget;
    };

    const RequestId id = engine_.submit(std::move(request));
    while (!engine_.finished(id)) {
        engine_.step();
        if (!may_go_on()) engine_.cancel(id);
    }
    const Result result = engine_.take(id);
    ChatAnswer& answer = turn.answer;
    if (first) answer.prompt_tokens = result.prompt_tokens;
    answer.reason = result.reason;
    answer.error = result.error;
    if (first)
        answer.timing.prefill_seconds = result.timing.prefill_seconds;
    else
        answer.timing.decode_seconds += result.timing.prefill_seconds;
    answer.timing.decode_seconds += result.timing.decode_seconds;
    turn.over_budget = turn.over_budget && !turn.stopped && result.reason == FinishReason::cancelled;
}

void ChatSession::deliver(Turn&, const ChatDelta& delta, const ChatCallbacks& callbacks) {
    if (!delta.reasoning.empty() && callbacks.reasoning) callbacks.reasoning(delta.reasoning);
    if (!delta.content.empty() && callbacks.content) callbacks.content(delta.content);
    for (const ToolCallDelta& call : delta.tool_calls)
        if (callbacks.tool_call) callbacks.tool_call(call.call);
}

}  // namespace quern
