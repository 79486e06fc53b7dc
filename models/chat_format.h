// Conversations: messages to a prompt, and generated text back to a message. What all formats have in common;
// ModelFamily::chat is the format of a model.
//
// Text that people and tools wrote can never become a control token: see PromptSegment.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ggml-like/json.h"
#include "models/vision.h"

namespace quern {

class Tokenizer;

struct ToolCall {
    std::string id, name;
    /// Text of a JSON object, keys in order. Rendering accepts anything: empty or null means no arguments, and
    /// what is not an object is shown to the model as one parameter named "arguments".
    std::string arguments;
};

/// An image in a message, or a video as frames.
struct MessageImage {
    size_t at = 0;      // bytes of the content before it
    std::string where;  // names it in errors
    /// As it was sent, until it is read: a part of a content, or a file.
    nlohmann::ordered_json part = nullptr;
    std::vector<uint8_t> file = {};
    ImagePtr image = nullptr;           // as the model reads it; rendering needs it,
    std::vector<FramePair> pairs = {};  // or these
};

struct Message {
    std::string role;     // system, developer, user, assistant, tool
    std::string content;  // parts of a list content are joined without anything between them
    /// assistant: its thinking. If absent (not just empty), it is a <think> block inside `content`, if there is one.
    std::optional<std::string> reasoning;
    std::vector<ToolCall> tool_calls;  // assistant
    std::string tool_call_id;          // tool; the format does not show it to the model
    std::vector<MessageImage> images;  // user, tool: in the order of the content
};

/// How long a model should think, for formats that tell it in words.
enum class ReasoningEffort : uint8_t { unset, low, medium, high };

struct ChatOptions {
    bool thinking = true;
    /// Keep the thinking of all assistant turns, not only of those after the last user query. Then what a growing
    /// conversation has in common with its past renders the same. Empty: as the format does it.
    std::optional<bool> preserve_thinking = {};
    ReasoningEffort effort = ReasoningEffort::unset;
    bool add_generation_prompt = true;
};

/// A part of the rendered prompt. With `control`, `text` is exactly one marker that the format itself wrote,
/// such as <|im_start|>, and becomes its token. All else, words of the format and of people, is plain and is
/// encoded as text even where it looks like a marker. Plain segments are never empty and never adjacent, so
/// that words are split across the border of format and content as in the reference.
struct PromptSegment {
    std::string text;
    bool control = false;
    ImagePtr image =
        nullptr;  // of a control segment that stands for an image: its keys follow in the place of a token
};

struct RenderedPrompt {
    std::vector<PromptSegment> segments;
    /// Generation starts inside <think>; ChatParser needs to know.
    bool thinking_open = false;
    /// Where conversations branch, as numbers of segments: after the system and tools block, and after each turn,
    /// but not after the generation prompt.
    std::vector<size_t> boundaries;

    std::string text() const;
    /// In the order of their segments.
    std::vector<ImagePtr> images() const;
};

/// The prompt as token ids. The reference encodes the rendered text as a whole; the ids are the same if people's
/// text has no markers. A marker that this tokenizer does not have stays text. `boundaries`, if given, receives
/// prompt.boundaries counted in ids.
std::vector<int32_t> encode_prompt(const RenderedPrompt& prompt, const Tokenizer& tokenizer,
                                   std::vector<size_t>* boundaries = nullptr);

struct ToolCallDelta {
    int index = 0;  // from 0, in the order of the text
    ToolCall call;  // complete, with id, name and all arguments
};

/// What more text adds to a call that is being written. The pieces of a call come before the call itself, and their
/// arguments joined are its arguments, unless a parameter was written twice. A call that turns out to be none, or is
/// cut off, may have had pieces.
struct ToolCallPiece {
    int index = 0;
    std::string id, name;   // in the first piece of a call only
    std::string arguments;  // text of the JSON object
    std::string text;       // what of it is text of a parameter that is a string, not quoted
};

/// What more generated text adds. Every field may be empty.
struct ChatDelta {
    std::string reasoning, content;
    std::vector<ToolCallPiece> call_pieces;
    std::vector<ToolCallDelta> tool_calls;

    bool empty() const {
        return reasoning.empty() && content.empty() && call_pieces.empty() && tool_calls.empty();
    }
};

/// Splits generated text, as it arrives, into thinking, content and tool calls. The deltas add up to the same result
/// wherever the text is cut, even inside a character. Never throws on any text and loses none: a call that is
/// not well-formed stays text. Linear time; memory a small multiple of the text.
class ChatParser {
  public:
    virtual ~ChatParser() = default;

    /// Invalid UTF-8 is replaced by U+FFFD, so that deltas can always go into JSON.
    virtual ChatDelta push(std::string_view text) = 0;
    /// The rest, once, at the end of generation. `truncated`: a limit ended it, not the model; an unclosed call then
    /// becomes text. Otherwise missing end tags are forgiven, except that of a value.
    virtual ChatDelta finish(bool truncated = false) = 0;

    /// All so far, except what is held back. Role assistant; reasoning is set if the prompt opened it.
    virtual const Message& message() const = 0;
    virtual bool in_reasoning() const = 0;
};

/// A format. `tools`: an array of tool objects; null, empty or no array means none.
struct ChatFormat {
    const char* name;  // of the official template that renders the same: "Qwen3.6"
    /// Throws only Error(usage): no messages, or an unknown role. Invalid UTF-8 passes through; the tokenizer
    /// replaces it.
    RenderedPrompt (*render)(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                             const ChatOptions& options);
    /// `thinking_open`: RenderedPrompt::thinking_open, not what the request asked for. `tools` is not used after
    /// the call. `id_seed` != 0 makes the ids of calls repeatable.
    std::unique_ptr<ChatParser> (*parser)(bool thinking_open, const nlohmann::ordered_json& tools,
                                          uint64_t id_seed);

    // Words that the format writes, or that the model is made to write.
    const char* turn_end;        // the marker that ends an answer
    const char* text_end;        // the marker that ends a document
    const char* thinking_end;    // in generated text
    const char* close_thinking;  // closes the thinking in the model's place
    const char* before_call;     // between thinking and a call
    const char* call_marker;     // the marker that begins a call
    const char* call_begin;      // a call up to the name
    const char* call_name_end;   // the character after the name
    const char* call_arguments;  // a call from the end of the name to its arguments
};

/// The format for a checkpoint, by its own chat template.
struct ChatChoice {
    const ChatFormat* format;
    std::string note;  // one line for the user, if the template is not the official one of `format`
};

}  // namespace quern
