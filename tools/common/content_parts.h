// Parts of a message's content as text. What the model cannot read, and what other servers ran, becomes a few words that
// say so: a conversation with such a part must go on.
#pragma once

#include <string>

#include "ggml-like/json.h"

namespace quern {

/// Of the chat, messages and responses APIs: text as it is; documents, search results and summaries by their text;
/// images, audio and files as "[image left out: ...]". Thinking is no content: empty. Throws FieldError for what is
/// no object with a type.
std::string part_text(const nlohmann::ordered_json& part, const std::string& where);

/// The thinking among the parts of a content; empty if there is none.
std::string thinking_of(const nlohmann::ordered_json& content);

/// A field of an object that is a string; else, or of no object, empty.
std::string text_of(const nlohmann::ordered_json& object, const char* name);

/// All that is written for people in a value of unknown form: titles, addresses, texts and errors.
std::string readable_text(const nlohmann::ordered_json& value);

}  // namespace quern
