// The page at /: tools/serve/page.html, embedded when the program is built.
#pragma once

#include <string_view>

namespace quern {

/// "NONCE" stands for the number in each reply's content security policy: scripts and styles without it have no effect.
extern const std::string_view kPage;

}  // namespace quern
