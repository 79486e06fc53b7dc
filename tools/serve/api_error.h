// ApiError: an error as a reply, in the form of the OpenAI API.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "tools/common/fields.h"
#include "tools/serve/http_server.h"

namespace quern {

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
    /// {"error": {message, type, param, code}}
    nlohmann::ordered_json json() const;
    HttpReply reply() const;
};

}  // namespace quern
