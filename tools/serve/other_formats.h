// The Anthropic messages API and the OpenAI responses API: their requests are converted to the chat API's form, their
// answers have formats of their own.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>

#include "tools/serve/answer_format.h"

namespace quern {

/// Throws FieldError.
nlohmann::ordered_json chat_from_messages(const nlohmann::ordered_json& body);
std::unique_ptr<AnswerFormat> messages_format(const GenerationRequest& request);
nlohmann::ordered_json anthropic_error(const ApiError& error);

/// Stateless: previous_response_id and background are refused, store has no effect. Only tools of type function are
/// used.
nlohmann::ordered_json chat_from_responses(const nlohmann::ordered_json& body);
std::unique_ptr<AnswerFormat> responses_format(const GenerationRequest& request);

}  // namespace quern
