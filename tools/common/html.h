// HTML pages that need nothing else.
#pragma once

#include <string>
#include <string_view>

namespace quern {

/// `text` with the characters that mean something in HTML written as references.
std::string html_text(std::string_view text);

}  // namespace quern
