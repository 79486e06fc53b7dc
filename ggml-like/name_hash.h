// A hash of names with a key that differs in every process, so that no file can be made whose names all
// collide.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string_view>
#include <unordered_map>

namespace quern {

struct NameHash {
    size_t operator()(std::string_view s) const {
        static const uint64_t key = make_key();
        uint64_t h = key ^ s.size();
        size_t i = 0;
        for (; i + 8 <= s.size(); i += 8) h = mix(h, load(s.data() + i, 8));
        return static_cast<size_t>(mix(h, load(s.data() + i, s.size() - i)) ^ key);
    }

  private:
    static uint64_t load(const char* p, size_t n) {
        uint64_t v = 0;
        if (n > 0) memcpy(&v, p, n);  // p may be null when n is 0
        return v;
    }
    static uint64_t mix(uint64_t a, uint64_t b) {  // the two halves of a 128-bit product, folded
        const uint64_t x = a ^ 0x9e3779b97f4a7c15ull, y = b ^ 0xd6e8feb86659fd93ull;
        const uint64_t xl = x & 0xffffffffu, xh = x >> 32, yl = y & 0xffffffffu, yh = y >> 32;
        const uint64_t mid = xh * yl + ((xl * yl) >> 32);
        const uint64_t mid2 = xl * yh + (mid & 0xffffffffu);
        const uint64_t high = xh * yh + (mid >> 32) + (mid2 >> 32);
        return (x * y) ^ high ^ a;
    }
    static uint64_t make_key() {
        std::random_device device;
        return (static_cast<uint64_t>(device()) << 32) ^ device();
    }
};

/// Views of names that live elsewhere to an index.
using NameMap = std::unordered_map<std::string_view, uint32_t, NameHash>;

}  // namespace quern
