// A quick look at JSON text before it becomes a tree: nlohmann's trees copy, dump and compare by recursion.
#pragma once

#include <string_view>

namespace quern {

inline constexpr int kMaxJsonDepth = 64;

/// Whether brackets outside of strings nest at most kMaxJsonDepth deep. Says nothing about validity.
inline bool shallow_enough(std::string_view text) {
    int depth = 0;
    bool quoted = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (quoted) {
            if (c == '\\')
                ++i;
            else if (c == '"')
                quoted = false;
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            if (++depth > kMaxJsonDepth) return false;
        } else if (c == '}' || c == ']') {
            --depth;
        }
    }
    return true;
}

}  // namespace quern
