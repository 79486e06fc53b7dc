// ContentHash: 64 bits that tell contents apart, the same on every machine and in every process. Finds
// accidents, not forgeries.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace quern {

class ContentHash {
  public:
    /// Each call counts: "ab" has another hash than "a" followed by "b".
    void add(const void* data, size_t bytes) {
        mix(bytes);
        const auto* p = static_cast<const std::byte*>(data);
        for (; bytes >= 8; p += 8, bytes -= 8) mix(load(p, 8));
        if (bytes > 0) mix(load(p, bytes));
    }
    void add(std::string_view text) { add(text.data(), text.size()); }
    void add(int64_t number) { mix(static_cast<uint64_t>(number)); }

    uint64_t value() const {
        const uint64_t h = (state_ ^ (state_ >> 32)) * 0xd6e8feb86659fd93u;
        return h ^ (h >> 29);
    }

  private:
    static uint64_t load(const std::byte* p, size_t bytes) {
        uint64_t word = 0;
        std::memcpy(&word, p, bytes);
        return word;
    }
    void mix(uint64_t word) {
        state_ = std::rotl(state_ ^ (word * 0x9e3779b97f4a7c15u), 29) * 0xbf58476d1ce4e5b9u;
    }

    uint64_t state_ = 0x2545f4914f6cdd1du;
};

}  // namespace quern
