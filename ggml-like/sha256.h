// SHA-256: a digest that nobody can make two contents share. Source: FIPS 180-4.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace quern {

class Sha256 {
  public:
    using Digest = std::array<uint32_t, 8>;  // the words of the digest, the first one first

    void add(std::span<const uint8_t> bytes);
    /// Of all that was added. Call once, last.
    Digest finish();

  private:
    void add_block(const uint8_t* block);

    Digest state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, 64> block_{};
    size_t filled_ = 0;
    uint64_t bytes_ = 0;
};

}  // namespace quern
