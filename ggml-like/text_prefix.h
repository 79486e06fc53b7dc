// The start of a text as a number, to sort and search many texts mostly without reading them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace quern {

/// The first eight bytes, big-endian, zeros behind a shorter text. a < b implies text_prefix(a) <=
/// text_prefix(b).
inline uint64_t text_prefix(std::string_view text) {
    uint64_t out = 0;
    for (size_t i = 0; i < 8; ++i)
        out = out << 8 | (i < text.size() ? static_cast<unsigned char>(text[i]) : 0u);
    return out;
}

}  // namespace quern
