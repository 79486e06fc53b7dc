// Access: who may send what, decided before the body of a request is read.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/serve/http_server.h"

namespace quern {

struct AccessRules {
    std::vector<std::string> keys;   // none: anybody
    std::vector<std::string> hosts;  // names for this machine beside addresses and localhost
    std::vector<std::string> cors_origins;
    int64_t body_bytes = 0;
};

/// The key that a request brings: Authorization: Bearer KEY, or x-api-key; empty: none.
std::string api_key(const HttpRequest& request);

/// The time it takes does not depend on where `given` differs from `secret`.
bool equal_in_constant_time(std::string_view given, std::string_view secret);

/// The host of a Host header, without port: "[::1]:8080" is "::1".
std::string host_of(std::string_view header);

/// Whether it is an IPv4 or IPv6 address, or localhost, which DNS cannot redirect.
bool is_address(const std::string& host);

/// Throws ApiError for a request that is refused: 400 no or several Host headers, 401 no valid key, 403 a foreign Host
/// or Origin, 411 no length, 413 too long, 415 not JSON or packed in another way than gzip and deflate, 501 another
/// transfer coding than chunked. `open`: no key is needed.
void check_access(const HttpRequest& request, const AccessRules& rules, bool open);

/// Headers that let a page of the request's origin read the reply, or, of a preflight, send the request with the headers
/// that it asks for; none if it is not allowed.
std::vector<std::pair<std::string, std::string>> cors_headers(const HttpRequest& request,
                                                              const AccessRules& rules);

}  // namespace quern
