#include "tools/serve/api_error.h"

namespace quern {

const char* ApiError::type() const {
    switch (status) {
        case 401:
            return "authentication_error";
        case 403:
            return "permission_error";
        case 404:
            return "not_found_error";
        case 429:
            return "rate_limit_error";
        case 501:
            return "not_supported_error";
        case 503:
            return "unavailable_error";
        default:
            return status < 500 ? "invalid_request_error" : "server_error";
    }
}

ErrorForm error_form(const HttpRequest& r) {
    if (r.path.starts_with("/api/")) return ErrorForm::ollama;
    const bool anthropic = r.path == "/v1/messages" || r.path.starts_with("/v1/messages/") ||
                           !r.header("anthropic-version").empty();
    return anthropic ? ErrorForm::anthropic : ErrorForm::openai;
}

nlohmann::ordered_json ApiError::json(ErrorForm form) const {
    const auto or_null = [](const std::string& text) {
        return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
    };
    switch (form) {
        case ErrorForm::ollama:
            return {{"error", what()}};
        case ErrorForm::anthropic: {
            const char* name = status == 429 || status == 503 ? "overloaded_error"
                               : status == 413                ? "request_too_large"
                               : status >= 500                ? "api_error"
                                                              : type();
            return {{"type", "error"}, {"error", {{"type", name}, {"message", what()}}}};
        }
        default:
            return {{"error",
                     {{"message", what()},
                      {"type", type()},
                      {"param", or_null(param)},
                      {"code", or_null(code)}}}};
    }
}

HttpReply ApiError::reply(ErrorForm form) const {
    HttpReply out{.status = form == ErrorForm::anthropic && status == 429 ? 529 : status,
                  .body = dump(json(form))};
    if (status == 429) out.headers.emplace_back("Retry-After", "1");
    if (status == 503) out.headers.emplace_back("Retry-After", "5");
    if (status == 401) out.headers.emplace_back("WWW-Authenticate", "Bearer");
    return out;
}

}  // namespace quern
