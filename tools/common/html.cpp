#include "tools/common/html.h"

#include <fmt/format.h>

namespace quern {

std::string html_text(std::string_view text) {
    std::string out;
    for (const char c : text) {
        if (c == '<' || c == '>' || c == '&' || c == '"')
            out += fmt::format("&#{};", static_cast<int>(c));
        else
            out += c;
    }
    return out;
}

}  // namespace quern
