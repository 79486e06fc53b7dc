#include "tools/serve/page.h"

#include <fmt/format.h>

#include "tools/serve/answer_format.h"
#include "tools/serve/api_error.h"
#include "tools/serve/page_files.h"

namespace quern {
namespace {

constexpr std::string_view kFolder = "/page/";

void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
}

HttpReply index_reply() {
    const std::string nonce = random_id("");
    HttpReply reply{.body = std::string(kPageIndex), .type = "text/html; charset=utf-8"};
    replace_all(reply.body, "NONCE", nonce);
    replace_all(reply.body, "VERSION", kPageVersion);
    reply.headers = {
        {"Content-Security-Policy",
         fmt::format("default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
                     "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
                     "frame-ancestors 'none'",
                     nonce)},
        {"Referrer-Policy", "no-referrer"},
        {"Cache-Control", "no-store"}};
    return reply;
}

HttpReply file_reply(std::string_view path) {
    const size_t slash = path.find('/');
    if (slash != std::string_view::npos && path.substr(0, slash) == kPageVersion)
        for (const PageFile& file : page_files()) {
            if (path.substr(slash + 1) != file.name) continue;
            HttpReply reply{.body = std::string(file.bytes), .type = std::string(file.type)};
            reply.headers = {{"Cache-Control", "public, max-age=31536000, immutable"}};
            if (file.gzip) reply.headers.emplace_back("Content-Encoding", "gzip");
            return reply;
        }
    throw ApiError(404, "not_found", "the page has no such file; load the page again");
}

}  // namespace

bool is_page_path(const std::string& path) { return path == "/" || path.starts_with(kFolder); }

HttpReply page_reply(const std::string& path) {
    return path == "/" ? index_reply() : file_reply(std::string_view(path).substr(kFolder.size()));
}

}  // namespace quern
