// Chat format of Qwen3.6: a conversation rendered to a prompt, and generated text parsed back to a message.
//
// Rendering and parsing are native: the rules are those of the model's published template, but no template is
// run and no conversation can make rendering fail half way. Differences from the template, all on purpose:
//   - system and developer messages anywhere are merged into the one system block, joined by an empty line;
//   - a conversation without a user question is rendered, not refused;
//   - text of messages never becomes a control token, whatever it says.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

class Tokenizer;

struct ToolCall {
    std::string id;
    std::string name;
    std::string arguments;  // a JSON object as text, in the order of its keys
};

struct Message {
    std::string role;  // system, developer, user, assistant, tool
    std::string content;
    std::optional<std::string> reasoning;  // assistant: its thinking, without tags
    std::vector<ToolCall> tool_calls;      // assistant
    std::string tool_call_id;              // tool: which call it answers; not rendered
};

struct ChatOptions {
    bool thinking = true;
    bool preserve_thinking = false;  // keep the thinking of earlier turns
    bool add_generation_prompt = true;
};

/// Part of a prompt: exactly one marker that the format itself wrote, or a stretch of text with none.
struct PromptSegment {
    std::string text;
    bool control;
};

struct RenderedPrompt {
    std::vector<PromptSegment> segments;
    bool thinking_open = false;  // the answer begins inside the thinking
    /// Numbers of leading segments after which a turn (or system + tools) is complete: where a state is worth
    /// keeping.
    std::vector<size_t> boundaries;

    std::string text() const;
};

/// Throws Error(usage) for an empty conversation or an unknown role. `tools`: an array as in the OpenAI API,
/// or null.
RenderedPrompt render_chat(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                           const ChatOptions& options);

/// Token ids of a prompt: the format's markers become control tokens, everything else stays text.
std::vector<int32_t> encode_prompt(const RenderedPrompt& prompt, const Tokenizer& tokenizer);

/// JSON as Python's json.dumps(ensure_ascii=False) writes it: ", " and ": ", shortest round-trip numbers.
/// Integers beyond 64 bits were already rounded to doubles when they were parsed.
std::string python_json(const nlohmann::ordered_json& value);
/// Without leading and trailing characters that Python's str.strip() removes.
std::string_view python_strip(std::string_view text);

struct ToolCallDelta {
    int index;
    ToolCall call;  // complete: a call is reported once it is understood
};

/// What a piece of generated text added.
struct ChatDelta {
    std::string reasoning;
    std::string content;
    std::vector<ToolCallDelta> tool_calls;
};

/// Splits generated text into thinking, answer and tool calls while it arrives. How it is cut into pushes
/// makes no difference. Never fails: a call that cannot be understood is content. Whitespace around thinking,
/// and at the end of the content, is dropped. Linear in the length of the text.
class ChatParser {
  public:
    /// `tools`: types for the arguments; without a schema every argument is a string.
    ChatParser(bool thinking_open, nlohmann::ordered_json tools);

    ChatDelta push(std::string_view text);
    /// The text is over: what was held back is decided.
    ChatDelta finish();
    bool in_reasoning() const { return state_ == State::reasoning; }
    /// The whole message so far.
    const Message& message() const { return message_; }

  private:
    enum class State { reasoning, content, call, after_call };
    enum class Next { more, wait };

    Next step(bool last, ChatDelta& delta);
    Next step_text(bool last, ChatDelta& delta);
    Next step_call(bool last, ChatDelta& delta);
    Next step_after_call(bool last);
    void emit(std::string_view text, ChatDelta& delta);
    bool emit_call(std::string_view function, ChatDelta& delta);
    void enter_content();

    nlohmann::ordered_json tools_;
    State state_;
    std::string buffer_;  // not yet decided
    size_t at_ = 0;       // consumed part of buffer_
    size_t scan_ = 0;     // in a call: where the search for its end goes on
    std::string space_;   // whitespace that belongs to the text only if more text follows
    bool trim_start_ = false;
    Message message_;
};

/// One line for the user if the checkpoint's chat template is not one whose rules these are; else empty.
std::string known_template_note(const std::string& directory);

}  // namespace quern
