#include "tools/engine/chat_session.h"

#include "ggml-like/check.h"
#include "models/model.h"
#include "models/tokenizer.h"
#include "tools/engine/answer_reader.h"

namespace quern {
namespace {

const Tokenizer& tokenizer_of(const Engine& engine) {
    const Tokenizer* tokenizer = engine.model().tokenizer();
    CHECK(tokenizer != nullptr, "[chat] the model was loaded without its tokenizer");
    return *tokenizer;
}

void deliver(const AnswerDelta& delta, const ChatCallbacks& callbacks) {
    if (!delta.reasoning.empty() && callbacks.reasoning) callbacks.reasoning(delta.reasoning);
    if (!delta.content.empty() && callbacks.content) callbacks.content(delta.content);
    for (const ToolCallDelta& call : delta.tool_calls)
        if (callbacks.tool_call) callbacks.tool_call(call.call);
}

}  // namespace

ChatSession::ChatSession(Engine& engine) : engine_(engine), tokenizer_(tokenizer_of(engine)) {}

ChatAnswer ChatSession::respond(std::span<const Message> messages, const ChatSettings& settings,
                                const ChatCallbacks& callbacks) {
    const RenderedPrompt prompt =
        engine_.model().chat().render(messages, settings.tools,
                                      {.thinking = settings.thinking,
                                       .preserve_thinking = settings.preserve_thinking,
                                       .effort = settings.effort});
    AnswerReader reader(engine_.model(), {.thinking_open = prompt.thinking_open,
                                          .tools = settings.tools,
                                          .thinking_budget = settings.thinking_budget,
                                          .grammar = settings.grammar});
    Request request;
    std::vector<size_t> boundaries;
    request.prompt = encode_prompt(prompt, tokenizer_, &boundaries);
    request.boundaries.assign(boundaries.begin(), boundaries.end());
    request.images = prompt.images();
    return generate(std::move(request), reader, settings, callbacks);
}

ChatAnswer ChatSession::complete(const std::string& text, const ChatSettings& settings,
                                 const ChatCallbacks& callbacks) {
    AnswerReader reader(engine_.model(), {.chat = false, .grammar = settings.grammar});
    Request request;
    request.prompt = tokenizer_.encode(text, Tokenizer::Markers::control);
    return generate(std::move(request), reader, settings, callbacks);
}

ChatAnswer ChatSession::generate(Request request, AnswerReader& reader, const ChatSettings& settings,
                                 const ChatCallbacks& callbacks) {
    const auto may_go_on = [&] { return !callbacks.keep_going || callbacks.keep_going(); };
    request.sampling = settings.sampling;
    request.max_tokens = settings.max_tokens;
    if (!settings.ignore_eos) request.stop_ids = engine_.model().generation().eos_ids;
    reader.attach(request, [&](const AnswerDelta& delta) {
        deliver(delta, callbacks);
        return may_go_on();
    });
    const RequestId id = engine_.submit(std::move(request));
    while (!engine_.finished(id)) {
        engine_.step();
        if (!may_go_on()) engine_.cancel(id);
    }
    const Result result = engine_.take(id);
    deliver(reader.finish(result.reason), callbacks);
    ChatAnswer answer;
    answer.message = reader.message();
    answer.message.content = reader.content();
    // What the reader ends looks like a wish of the caller to the engine.
    answer.reason =
        reader.ended() && result.reason != FinishReason::error ? FinishReason::stop : result.reason;
    answer.error = result.error;
    answer.prompt_tokens = result.prompt_tokens;
    answer.cached_tokens = result.cached_tokens;
    answer.answer_tokens = reader.tokens();
    answer.reasoning_tokens = reader.reasoning_tokens();
    answer.drafted = result.drafted;
    answer.accepted = result.accepted;
    answer.timing = result.timing;
    return answer;
}

}  // namespace quern
