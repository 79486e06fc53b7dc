// The page at /: tools/serve/page.html, put into the program when it is built.
#pragma once

#include <string_view>

namespace quern {

/// With "NONCE" where the number goes that the policy of each reply names: what comes without it does not
/// run.
extern const std::string_view kPage;

}  // namespace quern
