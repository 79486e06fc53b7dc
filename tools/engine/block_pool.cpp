#include "tools/engine/block_pool.h"

#include <limits>

#include "ggml-like/check.h"

namespace quern {

BlockPool::BlockPool(Backend& backend, int64_t block_bytes, int64_t count, const char* what)
    : backend_(backend), block_bytes_(block_bytes), count_(count), what_(what) {
    if (count <= 0) return;
    memory_ = static_cast<std::byte*>(backend.alloc(count * block_bytes, what));
    for (int64_t i = count; i-- > 0;) free_.push_back(memory_ + i * block_bytes);
}

BlockPool::~BlockPool() {
    if (memory_ != nullptr) backend_.free(memory_);
}

std::byte* BlockPool::take() {
    if (count_ == kAsNeeded) return static_cast<std::byte*>(backend_.alloc(block_bytes_, what_));
    if (free_.empty()) FAIL(memory, "no room for {}: all {} are in use", what_, count_);
    std::byte* block = free_.back();
    free_.pop_back();
    return block;
}

void BlockPool::give_back(std::byte* block) {
    if (count_ == kAsNeeded) return backend_.free(block);
    free_.push_back(block);
}

int64_t BlockPool::left() const {
    return count_ == kAsNeeded ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(free_.size());
}

}  // namespace quern
