// BlockPool: equal blocks of a backend's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-like/backend.h"

namespace quern {

class BlockPool {
  public:
    static constexpr int64_t kAsNeeded = -1;

    /// `count` blocks in one allocation, so that nothing is allocated while a device works. kAsNeeded: each block is
    /// allocated when it is taken and freed when it is given back. Throws Error(memory).
    BlockPool(Backend& backend, int64_t block_bytes, int64_t count, const char* what);
    ~BlockPool();
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;

    /// Contents undefined. Throws Error(memory) if none is left.
    std::byte* take();
    void give_back(std::byte* block);
    /// Blocks that can be taken now.
    int64_t left() const;

  private:
    Backend& backend_;
    int64_t block_bytes_, count_;
    const char* what_;
    std::byte* memory_ = nullptr;
    std::vector<std::byte*> free_;
};

}  // namespace quern
