// The conversation format of Qwen3.6.
//
// Rendering needs no template engine. Where the checkpoint's Jinja template (Qwen3.6, and Qwen3.5 with two
// differences) renders a conversation, the text here is the same, byte for byte; where the template raises an
// error, the conversation is normalised first (rules below).
// Source: the chat templates that Qwen publishes with its checkpoints; json.dumps and str.strip of CPython.
#pragma once

#include "models/chat_format.h"

namespace quern {

/// The markers: <|im_start|>, <|im_end|>, <think>, </think>, <tool_call>, </tool_call>, <tool_response>,
/// </tool_response>. Tools are dumped as they are. RenderedPrompt::boundaries lie directly after the line feed
/// behind an <|im_end|>.
///
/// Normalisation, where the template would raise:
/// - developer counts as system. All system messages become one at the start: contents stripped, empty ones
///   dropped, joined by an empty line.
/// - without a user query, no assistant turn is after the last query.
RenderedPrompt render_qwen3_6_chat(std::span<const Message> messages, const nlohmann::ordered_json& tools,
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

/// About chat_template.jinja, else chat_template in tokenizer_config.json. Empty if there is none, or if this format
/// renders the same (Qwen3.6, Qwen3.5, quern's demo).
std::string qwen3_6_template_note(const std::string& directory);

inline constexpr ChatFormat kQwen36Chat = {.render = render_qwen3_6_chat,
                                           .parser = make_qwen3_6_parser,
                                           .template_note = qwen3_6_template_note,
                                           .turn_end = "<|im_end|>",
                                           .text_end = "<|endoftext|>",
                                           .thinking_end = "</think>",
                                           .close_thinking = "\n</think>\n\n",
                                           .before_call = "\n\n",
                                           .call_marker = "<tool_call>",
                                           .call_begin = "<tool_call>\n<function=",
                                           .call_name_end = ">",
                                           .call_arguments = ">\n"};

}  // namespace quern
