// Conversations and tools in the form of the OpenAI API: in requests, transcripts, tool files and questions.
#pragma once

#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "models/chat_format.h"

namespace quern {

/// A list of messages. `where` names it in errors. Throws FieldError naming the element at fault.
std::vector<Message> read_messages(const nlohmann::ordered_json& list, const std::string& where = "messages");
/// Text of a content field: a string, null, or a list of parts (content_parts.h). Images go to `images` or, without it, are left
/// out with a few words. Throws FieldError.
std::string read_content(const nlohmann::ordered_json& content, const std::string& where,
                         std::vector<MessageImage>* images = nullptr);
/// The same as a content: its text, or the parts as they are if there are images among them.
nlohmann::ordered_json content_with_images(const nlohmann::ordered_json& content, const std::string& where);
/// A list of tools, checked and returned as it is. Throws FieldError.
nlohmann::ordered_json read_tools(const nlohmann::ordered_json& list);

}  // namespace quern
