// The Anthropic messages API, the OpenAI responses API, Ollama's and llama.cpp's own: their requests are converted to the
// chat API's or the completions API's form, their answers have formats of their own.
#pragma once

#include <functional>
#include <memory>

#include "ggml-like/json.h"
#include "tools/serve/answer_format.h"
#include "tools/serve/chat_body.h"

namespace quern {

/// Throws FieldError.
ChatBody chat_from_messages(const nlohmann::ordered_json& body);
std::unique_ptr<AnswerFormat> messages_format(const GenerationRequest& request);

/// The input as a list of items.
nlohmann::ordered_json response_items(const nlohmann::ordered_json& body);
/// `items`: those of earlier responses and then the request's own. previous_response_id and store are for the caller to
/// honour; background is refused.
ChatBody chat_from_responses(const nlohmann::ordered_json& body, const nlohmann::ordered_json& items);
/// `body`: the request, parts of which the response repeats. `keep`, if given, gets the finished response.
std::unique_ptr<AnswerFormat> responses_format(
    const GenerationRequest& request, const nlohmann::ordered_json& body,
    std::function<void(const nlohmann::ordered_json& response)> keep);

/// /api/chat; and /api/generate, whose body becomes one with messages, or with the prompt alone if it is raw, or with
/// input_prefix and input_suffix if it has a suffix.
ChatBody chat_from_ollama(const nlohmann::ordered_json& body);
ChatBody chat_from_ollama_prompt(const nlohmann::ordered_json& body);
/// The reply to a request without messages or prompt, which only loads the model.
nlohmann::ordered_json ollama_loaded(const nlohmann::ordered_json& body, bool chat);
std::unique_ptr<AnswerFormat> ollama_format(bool chat, const GenerationRequest& request);

std::unique_ptr<AnswerFormat> llama_format(const GenerationRequest& request);
/// What is to be written between input_prefix and input_suffix, after the files of input_extra. Throws ApiError(404) if
/// the vocabulary has no tokens for it.
std::vector<int32_t> infill_prompt(const Tokenizer& tokenizer, Fields& fields);

}  // namespace quern
