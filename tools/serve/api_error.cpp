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

nlohmann::ordered_json ApiError::json() const {
    const auto or_null = [](const std::string& text) {
        return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
    };
    return {{"error",
             {{"message", what()}, {"type", type()}, {"param", or_null(param)}, {"code", or_null(code)}}}};
}

HttpReply ApiError::reply() const {
    HttpReply out{.status = status, .body = dump(json())};
    if (status == 429) out.headers.emplace_back("Retry-After", "1");
    if (status == 503) out.headers.emplace_back("Retry-After", "5");
    if (status == 401) out.headers.emplace_back("WWW-Authenticate", "Bearer");
    return out;
}

}  // namespace quern
