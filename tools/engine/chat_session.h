// ChatSession: one answer in a conversation. Joins messages -> prompt -> ids -> engine -> text -> thinking,
// content and tool calls. Several may run on one engine; whoever owns the engine steps it.
//
//   ChatSession chat(engine, messages, settings, events);
//   while (chat.poll()) engine.step();
//   ChatAnswer answer = chat.take();
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/chat_format.h"
#include "models/tokenizer.h"
#include "tools/engine/engine.h"
#include "tools/engine/request.h"

namespace quern {

struct ChatSettings {
    ChatOptions format;
    nlohmann::ordered_json tools;  // array as in the OpenAI API, or null
    Sampling sampling;
    int64_t max_tokens = std::numeric_limits<int64_t>::max();
    /// Tokens of thinking after which it is closed for the model; -1: as long as it likes, 0: none at all.
    int64_t reasoning_budget = -1;
    bool ignore_eos = false;
};

/// Called from poll(), in order. May throw: the error leaves poll() and the answer is over.
struct ChatEvents {
    std::function<void(std::string_view)> on_reasoning, on_content;  // whole characters
    std::function<void(const ToolCall&)> on_tool_call;
    std::function<void(int64_t done, int64_t total)> on_prefill;  // prompt tokens
};

struct ChatAnswer {
    Message message;  // as far as it came
    FinishReason reason = FinishReason::none;
    std::string error;  // reason == error
    int64_t prompt_tokens = 0;
    int64_t answer_tokens = 0;  // that the model generated, thinking included
    int64_t reasoning_tokens = 0;
    bool budget_reached = false;  // the thinking was closed by force
    Timing timing;

    /// OpenAI's word: stop, length, tool_calls; and cancelled, error.
    const char* finish_reason() const;
};

class ChatSession {
  public:
    /// Renders, encodes and submits. Throws what render_chat, encode and Engine::submit throw, and
    /// Error(usage) if the model was loaded without tokenizer. The engine must outlive the session.
    ChatSession(Engine& engine, std::span<const Message> messages, const ChatSettings& settings,
                ChatEvents events);
    /// Cancels if still running.
    ~ChatSession();
    ChatSession(const ChatSession&) = delete;
    ChatSession& operator=(const ChatSession&) = delete;

    /// Handles what the last step brought. True: go on stepping.
    bool poll();
    /// Ends the answer; what came so far is kept. poll() returns false after the next step.
    void cancel();
    /// After poll() returned false.
    ChatAnswer take() { return std::move(answer_); }
    /// Steps the engine until the answer is over or `keep_going` says no.
    ChatAnswer run(const std::function<bool()>& keep_going);

  private:
    void submit();
    void handle(int32_t id);
    void emit(const ChatDelta& delta);
    void collect(const Result& result);
    void close_thinking();
    void finish(FinishReason reason, std::string error);
    bool over_budget() const;

    Engine& engine_;
    ChatSettings settings_;
    ChatEvents events_;
    std::vector<int32_t> ids_;  // prompt and answer so far
    size_t prompt_size_ = 0;
    StreamDecoder decoder_;
    std::unique_ptr<ChatParser> parser_;
    /// Shared with the engine's callbacks, which may outlive the session by a step.
    struct Arrived {
        std::vector<int32_t> ids;
        int64_t prefill = 0;
    };
    std::shared_ptr<Arrived> arrived_ = std::make_shared<Arrived>();
    RequestId request_ = 0;
    bool running_ = false;
    bool closing_ = false;  // the running request was cancelled to close the thinking
    bool done_ = false;
    ChatAnswer answer_;
};

}  // namespace quern
