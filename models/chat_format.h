// The conversation format of Qwen3.6: messages to a prompt, and the generated text back to a message.
//
// Rendering is native, without a template engine: wherever the checkpoint's Jinja template (Qwen3.6, and
// Qwen3.5 with two differences) renders a conversation, the text here is the same byte for byte; where the
// template raises an error, the conversation is put in order instead (normalisation rules at render_chat).
// Text that people and tools wrote can never become a control token: see PromptSegment.
// Source: the chat templates that Qwen publishes with its checkpoints; json.dumps and str.strip of CPython.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/python_text.h"

namespace quern {

class Tokenizer;

struct ToolCall {
    std::string id, name;
    /// Text of a JSON object, keys in order. Rendering takes anything: empty or null means no arguments, and
    /// what is no object is shown to the model as one parameter named "arguments".
    std::string arguments;
};

struct Message {
    std::string role;     // system, developer, user, assistant, tool
    std::string content;  // parts of a list content are joined without anything between them
    /// assistant: what it thought. Absent (not just empty): a <think> block inside `content` is taken for it.
    std::optional<std::string> reasoning;
    std::vector<ToolCall> tool_calls;  // assistant
    std::string tool_call_id;          // tool; the format does not show it to the model
};

struct ChatOptions {
    bool thinking = true;
    /// Keep the thinking of all assistant turns, not only of those after the last user query. The rendered
    /// prefix of a growing conversation then stays the same.
    bool preserve_thinking = false;
    bool add_generation_prompt = true;
};

/// A stretch of the rendered prompt. With `control`, `text` is exactly one marker that the format itself
/// wrote (<|im_start|>, <|im_end|>, <think>, </think>, <tool_call>, </tool_call>, <tool_response>,
/// </tool_response>) and becomes its token. All else, the format's words as well as people's, is plain and is
/// encoded as text even where it looks like a marker. Plain stretches are maximal, never empty and never
/// adjacent, so that words are cut across the border of format and content as the reference cuts them.
struct PromptSegment {
    std::string text;
    bool control = false;
};

struct RenderedPrompt {
    std::vector<PromptSegment> segments;
    /// Generation starts inside <think>: what ChatParser needs to know.
    bool thinking_open = false;
    /// Where conversations branch, as a number of segments: after the system and tools block, and after each
    /// turn. Each lies directly after the line feed behind an <|im_end|>. The generation prompt has none.
    std::vector<size_t> boundaries;

    std::string text() const;
};

/// `tools`: an array of tool objects, dumped as they are; null, empty or no array means none.
///
/// Never throws for a conversation, but for Error(usage): no messages, a role that does not exist.
/// Normalisation, where the template would raise:
/// - developer is system. All system messages become one at the start: contents stripped, empty ones left
///   out, joined by an empty line.
/// - no user query: no assistant turn counts as after the last query.
/// Invalid UTF-8 passes through; the tokenizer replaces it.
RenderedPrompt render_chat(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                           const ChatOptions& options);

/// The prompt as token ids: for conversations without markers in people's text, the same ids as the
/// reference, which encodes the rendered text as a whole. A marker that this tokenizer does not have stays
/// text. `boundaries`, if given, receives prompt.boundaries counted in ids.
std::vector<int32_t> encode_prompt(const RenderedPrompt& prompt, const Tokenizer& tokenizer,
                                   std::vector<size_t>* boundaries = nullptr);

struct ToolCallDelta {
    int index = 0;  // from 0, in the order of the text
    ToolCall call;  // complete: calls are reported in one piece, with id, name and all arguments
};

/// What one more piece of generated text adds. Every field may be empty.
struct ChatDelta {
    std::string reasoning, content;
    std::vector<ToolCallDelta> tool_calls;

    bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

/// Takes generated text apart while it arrives: thinking, content, tool calls. However the text is cut, even
/// inside a character, the deltas add up to the same result. Never throws on any text and loses none: a call
/// that is not well-formed is text like what is around it. Linear time; memory a small multiple of the text.
///
/// Thinking ends at </think>; when there are tools also at a well-formed call, because the model sometimes
/// forgets the tag (a </think> directly after the call is then dropped). Space around the thinking, after it
/// before a call and at the end is dropped.
///
/// Calls are looked for only when there are tools; else their text is content. Grammar, with white space
/// anywhere between the tags:
///   <tool_call> ( <function=NAME> ( <parameter=KEY> VALUE </parameter> )* </function> )+ </tool_call>
/// NAME and KEY are not empty and have no line feed. Of VALUE one leading and one trailing line feed are
/// dropped. Values may be code that speaks of these tags, so a tag in one counts only in its place:
/// </parameter> before another tag of the grammar or the end; </function> before </tool_call> or the end;
/// </tool_call> before <tool_call> or the end; <parameter=KEY> at the start of a line if the tool has another
/// parameter KEY. Missing end tags are made up for by the same rules.
///
/// Values become JSON by the schema of the tool's parameter (ToolSchemas); without one they are strings.
class ChatParser {
  public:
    /// `thinking_open`: RenderedPrompt::thinking_open of the prompt, never the request's wish. `tools`: as
    /// for render_chat; not used after the constructor. `id_seed` != 0 makes the ids of calls repeatable.
    ChatParser(bool thinking_open, const nlohmann::ordered_json& tools, uint64_t id_seed = 0);
    ~ChatParser();
    ChatParser(ChatParser&&) noexcept;
    ChatParser& operator=(ChatParser&&) noexcept;

    /// Invalid UTF-8 is replaced by U+FFFD, so that deltas can always go into JSON.
    ChatDelta push(std::string_view text);
    /// The rest, once, at the end of generation. `truncated`: a limit ended it, not the model; a call that is
    /// not closed is then not to be trusted and becomes text. Otherwise missing end tags are forgiven,
    /// but not that of a value.
    ChatDelta finish(bool truncated = false);

    /// All so far, without what is still held back. Role assistant; reasoning is set if the prompt opened it.
    const Message& message() const;
    bool in_reasoning() const;

  private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

/// Compares the checkpoint's own template (chat_template.jinja, else chat_template in tokenizer_config.json)
/// with what is built in here. Empty if it is one this format renders like (Qwen3.6, Qwen3.5, quern's demo)
/// or there is none; else one line for the user that says what is different. Never throws.
std::string known_template_note(const std::string& directory);

}  // namespace quern
