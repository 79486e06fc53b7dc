// The conversation formats of Qwen3.5, Qwen3.6 and Qwen3.8.
//
// Rendering needs no template engine. Where the official Jinja template renders a conversation, the text here is the
// same, byte for byte; where it raises an error, the conversation is normalised first (rules below). What differs:
//            tool arguments          earlier thinking, by default   <think> in a content   effort in words
//   Qwen3.5  true, false and null    dropped                        is thinking            no
//            as in Python
//   Qwen3.6  as JSON                 dropped                        is thinking            no
//   Qwen3.8  as JSON                 kept                           is text                first in the system turn
// Source: the chat templates that Qwen publishes with its checkpoints; json.dumps and str.strip of CPython.
#pragma once

#include "models/chat_format.h"

namespace quern {

/// The markers: <|im_start|>, <|im_end|>, <think>, </think>, <tool_call>, </tool_call>, <tool_response>,
/// </tool_response>. Tools are dumped as they are. RenderedPrompt::boundaries lie directly after the line feed
/// behind an <|im_end|>.
///
/// Normalisation, where the template would raise:
/// - developer counts as system. The system messages at the start become one: contents stripped, empty ones dropped,
///   joined by an empty line. Later ones are system turns where they are, so that what was said before stays the same.
/// - without a user query, no assistant turn is after the last query.
RenderedPrompt render_qwen3_5_chat(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                                   const ChatOptions& options);
RenderedPrompt render_qwen3_6_chat(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                                   const ChatOptions& options);
RenderedPrompt render_qwen3_8_chat(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                                   const ChatOptions& options);

/// Thinking ends at </think>. With tools it also ends at a well-formed call, because the model sometimes forgets the
/// tag (a </think> directly after the call is then dropped). White space is dropped around the thinking, before a
/// call and at the end.
///
/// Without tools, calls are content. Grammar, with white space anywhere between the tags:
///   <tool_call> ( <function=NAME> ( <parameter=KEY> VALUE </parameter> )* </function> )+ </tool_call>
/// NAME and KEY are not empty and have no line feed. One leading and one trailing line feed of VALUE are dropped.
/// Values may be code that contains these tags, so inside a value a tag counts only in its place: </parameter>
/// before another tag of the grammar or the end; </function> before </tool_call> or the end; </tool_call> before
/// <tool_call> or the end; <parameter=KEY> at the start of a line if the tool has another parameter KEY. The same
/// rules make up for missing end tags.
///
/// Values become JSON by the schema of the tool's parameter (ToolSchemas); without one they are strings.
std::unique_ptr<ChatParser> make_qwen3_6_parser(bool thinking_open, const nlohmann::ordered_json& tools,
                                                uint64_t id_seed = 0);

/// The format by chat_template.jinja, else by chat_template in tokenizer_config.json: that of the version whose template
/// it is, or was made from. Without a template Qwen3.6, without a note.
ChatChoice choose_qwen3_chat(const std::string& directory);

inline constexpr ChatFormat kQwen36Chat = {.name = "Qwen3.6",
                                           .render = render_qwen3_6_chat,
                                           .parser = make_qwen3_6_parser,
                                           .turn_end = "<|im_end|>",
                                           .text_end = "<|endoftext|>",
                                           .thinking_end = "</think>",
                                           .close_thinking = "\n</think>\n\n",
                                           .before_call = "\n\n",
                                           .call_marker = "<tool_call>",
                                           .call_begin = "<tool_call>\n<function=",
                                           .call_name_end = ">",
                                           .call_arguments = ">\n"};

/// kQwen36Chat but for what it renders.
constexpr ChatFormat qwen3_chat(const char* name, decltype(ChatFormat::render) render) {
    ChatFormat format = kQwen36Chat;
    format.name = name;
    format.render = render;
    return format;
}
inline constexpr ChatFormat kQwen35Chat = qwen3_chat("Qwen3.5", render_qwen3_5_chat);
inline constexpr ChatFormat kQwen38Chat = qwen3_chat("Qwen3.8", render_qwen3_8_chat);

}  // namespace quern
