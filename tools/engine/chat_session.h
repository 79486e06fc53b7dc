// ChatSession: from a conversation to an answer, for one person. Joins chat format, tokenizer and engine.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "models/chat_format.h"
#include "tools/engine/engine.h"
#include "tools/engine/grammar.h"

namespace quern {

struct ChatSettings {
    Sampling sampling;
    bool thinking = true;
    std::optional<bool> preserve_thinking = {};  // empty: as the format does it
    ReasoningEffort effort = ReasoningEffort::unset;
    int64_t thinking_budget = -1;  // tokens; then the thinking is closed for the model. -1: none
    int64_t max_tokens = std::numeric_limits<int64_t>::max();
    bool ignore_eos = false;
    nlohmann::ordered_json tools;
    std::shared_ptr<const Grammar> grammar = nullptr;  // what the answer must be, after the thinking
};

struct ChatCallbacks {
    std::function<void(const std::string&)> reasoning, content;
    std::function<void(const ToolCall&)> tool_call;
    std::function<bool()> keep_going;  // asked after every token and every chunk of the prompt
};

struct ChatAnswer {
    Message message;
    FinishReason reason = FinishReason::none;
    std::string error;
    int64_t prompt_tokens = 0;
    int64_t cached_tokens = 0;  // of the prompt
    int64_t answer_tokens = 0;
    int64_t reasoning_tokens = 0;
    int64_t drafted = 0, accepted = 0;  // Result's
    Timing timing;
};

class ChatSession {
  public:
    /// The engine's model must have a tokenizer.
    explicit ChatSession(Engine& engine);

    /// Answers the last message. Throws errors of the request; errors while answering are in the answer.
    ChatAnswer respond(std::span<const Message> messages, const ChatSettings& settings,
                       const ChatCallbacks& callbacks);
    /// Continues plain text, without a chat format.
    ChatAnswer complete(const std::string& text, const ChatSettings& settings,
                        const ChatCallbacks& callbacks);

  private:
    ChatAnswer generate(Request request, class AnswerReader& reader, const ChatSettings& settings,
                        const ChatCallbacks& callbacks);

    Engine& engine_;
    const Tokenizer& tokenizer_;
};

}  // namespace quern
