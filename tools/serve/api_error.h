// ApiError: an error as a reply, in the form of the API that was asked.
#pragma once

#include <stdexcept>
#include <string>

#include "ggml-like/json.h"
#include "tools/common/fields.h"
#include "tools/serve/http_server.h"

namespace quern {

/// openai: {"error": {message, type, param, code}}; llama.cpp's routes have it too.
/// anthropic: {"type": "error", "error": {type, message}}. ollama: {"error": message}.
enum class ErrorForm { openai, anthropic, ollama };

/// By the route; of routes that do not exist by the client's headers.
ErrorForm error_form(const HttpRequest& request);

struct ApiError : std::runtime_error {
    ApiError(int status_, std::string code_, const std::string& message, std::string param_ = {})
        : std::runtime_error(message), status(status_), code(std::move(code_)), param(std::move(param_)) {}

    /// 400 for a field of the request.
    explicit ApiError(const FieldError& e) : ApiError(400, e.code, e.what(), e.field) {}

    int status;
    std::string code;   // stable; for programs
    std::string param;  // the bad field, if there is one

    /// OpenAI's name for the status: invalid_request_error, authentication_error, ...
    const char* type() const;
    nlohmann::ordered_json json(ErrorForm form = ErrorForm::openai) const;
    HttpReply reply(ErrorForm form) const;
};

}  // namespace quern
