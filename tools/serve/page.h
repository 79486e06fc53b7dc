// The replies of the page at / and of its files at /page/VERSION/.
#pragma once

#include <string>

#include "tools/serve/http_server.h"

namespace quern {

/// Whether page_reply answers this path.
bool is_page_path(const std::string& path);

/// The page says nothing about the model or anybody, so it needs no key; it asks for one. Scripts and styles without
/// the number in its content security policy have no effect, and it loads nothing from elsewhere. Throws ApiError(404).
HttpReply page_reply(const std::string& path);

}  // namespace quern
