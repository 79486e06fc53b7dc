// The conversation format of Qwen3.6.
//
// Rendering is native, without a template engine: wherever the checkpoint's Jinja template (Qwen3.6, and
// Qwen3.5 with two differences) renders a conversation, the text here is the same byte for byte; where the
// template raises an error, the conversation is put in order instead (normalisation rules below).
// Source: the chat templates that Qwen publishes with its checkpoints; json.dumps and str.strip of CPython.
#pragma once

#include "models/chat_format.h"

namespace quern {

/// The markers: <|im_start|>, <|im_end|>, <think>, </think>, <tool_call>, </tool_call>, <tool_response>,
/// </tool_response>. Tools are dumped as they are. Each of RenderedPrompt::boundaries lies directly after the
/// line feed behind an <|im_end|>.
///
/// Normalisation, where the template would raise:
/// - developer is system. All system messages become one at the start: contents stripped, empty ones left
///   out, joined by an empty line.
/// - no user query: no assistant turn counts as after the last query.
RenderedPrompt render_qwen3_6_chat(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                                   const ChatOptions& options);

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
std::unique_ptr<ChatParser> make_qwen3_6_parser(bool thinking_open, const nlohmann::ordered_json& tools,
                                                uint64_t id_seed = 0);

/// Of chat_template.jinja, else chat_template in tokenizer_config.json. Nothing to say if it is one this
/// format renders like (Qwen3.6, Qwen3.5, quern's demo) or there is none.
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
