#include "tools/serve/access.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "tools/common/cli_values.h"
#include "tools/serve/api_error.h"

namespace quern {
namespace {

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

bool has_valid_key(const HttpRequest& r, const std::vector<std::string>& keys) {
    const std::string given = api_key(r);
    bool good = false;
    for (const std::string& key : keys) good |= equal_in_constant_time(given, key);
    return good;
}

bool contains(const std::vector<std::string>& list, const std::string& text) {
    return std::find(list.begin(), list.end(), text) != list.end();
}

/// A page of another site may make a browser send requests here; its Origin tells.
bool is_own_origin(const HttpRequest& r, const AccessRules& rules) {
    const std::string origin = r.header("Origin");
    if (origin.empty() || contains(rules.cors_origins, "*") || contains(rules.cors_origins, origin))
        return true;
    return origin == "http://" + r.header("Host") || origin == "https://" + r.header("Host");
}

/// In chunks, or of one length.
void check_framing(const HttpRequest& r, const AccessRules& rules) {
    const std::string coding = r.header("Transfer-Encoding");
    if (!coding.empty()) {
        if (lower(coding) != "chunked" || r.header_count("Transfer-Encoding") != 1)
            throw ApiError(501, "unsupported_coding", "the only Transfer-Encoding that is taken is chunked");
        if (r.header_count("Content-Length") != 0)
            throw ApiError(400, "bad_length", "a body has a Content-Length or is sent in chunks, not both");
        return;
    }
    if (r.header_count("Content-Length") != 1)
        throw ApiError(411, "length_required", "send the body with one Content-Length header, or in chunks");
    const std::string length = r.header("Content-Length");
    if (length.empty() || length.size() > 18 || length.find_first_not_of("0123456789") != std::string::npos)
        throw ApiError(
            400, "bad_length",
            fmt::format("Content-Length must be a number of bytes, found '{}'", printable(length)));
    if (r.content_length > rules.body_bytes)
        throw ApiError(413, "body_too_long",
                       "the body has " + std::to_string(r.content_length) + " bytes; at most " +
                           std::to_string(rules.body_bytes) + " are taken (--max-body)");
}

void check_body(const HttpRequest& r, const AccessRules& rules) {
    if (r.method != "POST") return;
    check_framing(r, rules);
    const std::string packing = r.header("Content-Encoding");
    if (!packing.empty() && packing != "gzip" && packing != "deflate")
        throw ApiError(
            415, "unsupported_encoding",
            fmt::format("Content-Encoding must be gzip or deflate, or the body not compressed, found '{}'",
                        printable(packing)));
    const std::string type = r.header("Content-Type");
    if (!type.empty() && type.find("json") == std::string::npos)
        throw ApiError(415, "unsupported_media_type",
                       fmt::format("send JSON with the header Content-Type: application/json, found '{}'",
                                   printable(type)));
}

}  // namespace

std::string api_key(const HttpRequest& r) {
    const std::string authorization = r.header("Authorization");
    constexpr std::string_view kBearer = "bearer ";
    if (authorization.size() > kBearer.size()) {
        if (lower(authorization.substr(0, kBearer.size())) == kBearer)
            return authorization.substr(kBearer.size());
    }
    return r.header("x-api-key");
}

bool equal_in_constant_time(std::string_view given, std::string_view secret) {
    volatile unsigned difference = given.size() != secret.size();
    for (size_t i = 0; i < secret.size(); ++i) {
        const char c = given.empty() ? '\0' : given[i % given.size()];
        difference = difference | static_cast<unsigned char>(c ^ secret[i]);
    }
    return difference == 0;
}

std::string host_of(std::string_view header) {
    if (!header.empty() && header.front() == '[') {
        const size_t end = header.find(']');
        return std::string(header.substr(1, end == std::string_view::npos ? end : end - 1));
    }
    return std::string(header.substr(0, header.rfind(':')));
}

bool is_address(const std::string& host) {
    unsigned char buffer[16];
    return host == "localhost" || inet_pton(AF_INET, host.c_str(), buffer) == 1 ||
           inet_pton(AF_INET6, host.c_str(), buffer) == 1;
}

void check_access(const HttpRequest& r, const AccessRules& rules, bool open) {
    if (r.header_count("Host") != 1) throw ApiError(400, "bad_host", "a request needs one Host header");
    // A name that an attacker's DNS points at this machine must not reach a server that asks for no key.
    const std::string host = host_of(r.header("Host"));
    if (rules.keys.empty() && !is_address(host) && !contains(rules.hosts, host))
        throw ApiError(403, "host_refused",
                       "the Host header names neither an address nor localhost; allow the name "
                       "with --allowed-hosts");
    if (!is_own_origin(r, rules))
        throw ApiError(403, "origin_refused", "web pages of other origins need --cors-origins");
    if (!open && !rules.keys.empty() && !has_valid_key(r, rules.keys))
        throw ApiError(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY");
    check_body(r, rules);
}

std::vector<std::pair<std::string, std::string>> cors_headers(const HttpRequest& r,
                                                              const AccessRules& rules) {
    const std::string origin = r.header("Origin");
    const bool any = contains(rules.cors_origins, "*");
    if (origin.empty() || (!any && !contains(rules.cors_origins, origin))) return {};
    std::vector<std::pair<std::string, std::string>> out = {
        {"Access-Control-Allow-Origin", any ? "*" : origin},
        {"Access-Control-Expose-Headers", "X-Request-Id, Retry-After, X-Quern-Ignored, X-Not-Enforced"},
        {"Vary", "Origin"}};
    if (r.method != "OPTIONS") return out;
    // Clients add headers of their own: whatever the page asks for.
    const std::string asked = r.header("Access-Control-Request-Headers");
    const bool good = !asked.empty() && asked.size() <= 4096 &&
                      std::all_of(asked.begin(), asked.end(), [](unsigned char c) {
                          return std::isalnum(c) != 0 || c == '-' || c == '_' || c == ',' || c == ' ';
                      });
    out.emplace_back("Access-Control-Allow-Headers",
                     good ? asked : "Authorization, Content-Type, X-Api-Key, X-Request-Id");
    out.emplace_back("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
    out.emplace_back("Access-Control-Max-Age", "600");
    if (r.header("Access-Control-Request-Private-Network") == "true")
        out.emplace_back("Access-Control-Allow-Private-Network", "true");
    return out;
}

}  // namespace quern
