#include "tools/engine/host_blocks.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "ggml-like/check.h"
#include "tools/engine/host_memory.h"

namespace quern {
namespace {

constexpr int64_t kSlabBytes = 128ll << 20;  // pinned in some 40 ms

}  // namespace

HostBlocks::HostBlocks(std::vector<int64_t> parts, int ranks, int64_t budget)
    : parts_(std::move(parts)),
      ranks_(ranks),
      rank_bytes_(std::accumulate(parts_.begin(), parts_.end(), int64_t{0})),
      most_(budget / block_bytes()),
      slab_blocks_(std::clamp<int64_t>(kSlabBytes / rank_bytes_, 1, std::max<int64_t>(most_, 1))) {}

HostBlocks::~HostBlocks() {
    while (growing_.valid())
        for (const Slab& slab : grown(true)) slabs_.push_back(slab);
    for (const Slab& slab : slabs_) slab.of->free_host(slab.memory);
}

/// Null without memory.
HostBlocks::Slab HostBlocks::take_slab(Backend& backend, int64_t blocks) const {
    if (blocks * block_bytes() > host_memory_left() / 4) return {};
    try {
        void* memory = backend.alloc_host(blocks * rank_bytes_, "states of earlier prompts");
        return {static_cast<std::byte*>(memory), blocks, &backend};
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::memory) throw;
        return {};
    }
}

/// The other thread: slabs with so many blocks together, or as many as there is memory for; `left`: blocks in all that may be
/// taken. An error ends it: whose device fails will tell of it.
void HostBlocks::take_ahead(Backend& backend, int64_t blocks, int64_t left) {
    bool more = true;
    while (more) {
        Slab slab;
        try {
            slab = take_slab(backend, std::min(slab_blocks_, left));
        } catch (const Error&) {
        }
        blocks -= slab.blocks;
        left -= slab.blocks;
        more = slab.memory != nullptr && blocks > 0 && left > 0;
        const std::lock_guard lock(ahead_.mutex);
        if (slab.memory != nullptr) ahead_.slabs.push_back(slab);
        ahead_.ended = !more;
        ahead_.changed.notify_one();
    }
}

void HostBlocks::grow_ahead(Backend& backend, int64_t blocks) {
    if (left() == 0 || growing_.valid()) return;
    ahead_.ended = false;
    growing_ = std::async(std::launch::async,
                          [this, &backend, blocks, left = left()] { take_ahead(backend, blocks, left); });
}

/// Slabs that the other thread has taken since the last call. `wait`: for one, if it still takes any.
std::vector<HostBlocks::Slab> HostBlocks::grown(bool wait) {
    if (!growing_.valid()) return {};
    std::unique_lock lock(ahead_.mutex);
    if (wait) ahead_.changed.wait(lock, [this] { return ahead_.ended || !ahead_.slabs.empty(); });
    std::vector<Slab> slabs = std::exchange(ahead_.slabs, {});
    const bool ended = ahead_.ended;
    lock.unlock();
    if (ended) growing_.get();
    return slabs;
}

void HostBlocks::expect(Backend& backend, int64_t blocks) {
    if (slabs_.empty()) grow_ahead(backend, blocks);
}

void HostBlocks::keep_ahead(Backend& backend) {
    for (const Slab& slab : grown(false)) add(slab);
    const int64_t wanted = needed_ + slab_blocks_, free = static_cast<int64_t>(free_.size());
    if (free < wanted) grow_ahead(backend, wanted - free);
}

void HostBlocks::add(const Slab& slab) {
    slabs_.push_back(slab);
    for (int64_t i = 0; i < slab.blocks; ++i) {
        free_.push_back(static_cast<int32_t>(blocks_.size()));
        std::push_heap(free_.begin(), free_.end(), std::greater<>());
        blocks_.emplace_back();
    }
}

bool HostBlocks::grow(Backend& backend) {
    std::vector<Slab> slabs = grown(true);
    if (slabs.empty() && left() > 0)
        if (const Slab slab = take_slab(backend, std::min(slab_blocks_, left())); slab.memory != nullptr)
            slabs.push_back(slab);
    for (const Slab& slab : slabs) add(slab);
    if (slabs.empty()) most_ = static_cast<int64_t>(blocks_.size());
    return !slabs.empty();
}

bool HostBlocks::make_free(Backend& backend, int64_t blocks) {
    needed_ = blocks;
    while (static_cast<int64_t>(free_.size()) < blocks)
        if (!grow(backend)) return false;
    return true;
}

int32_t HostBlocks::take() {
    CHECK(!free_.empty(), "[cache] no block is free: all {} are in use", blocks_.size());
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    const int32_t number = free_.back();
    free_.pop_back();
    Holders& h = blocks_[static_cast<size_t>(number)];
    h.count = 1;
    ++h.serial;
    ++used_;
    return number;
}

int32_t HostBlocks::share(int32_t block) {
    ++blocks_[static_cast<size_t>(block)].count;
    return block;
}

void HostBlocks::drop(std::vector<int32_t>& blocks) {
    for (const int32_t number : blocks) {
        if (--blocks_[static_cast<size_t>(number)].count > 0) continue;
        free_.push_back(number);
        std::push_heap(free_.begin(), free_.end(), std::greater<>());
        --used_;
    }
    blocks.clear();
}

std::byte* HostBlocks::place(int32_t block, size_t part) const {
    const Slab& slab = slabs_[static_cast<size_t>(block / slab_blocks_)];
    const int64_t before =
        std::accumulate(parts_.begin(), parts_.begin() + static_cast<std::ptrdiff_t>(part), int64_t{0});
    return slab.memory + before * slab.blocks + block % slab_blocks_ * parts_[part];
}

size_t HostBlocks::run_length(std::span<const int32_t> blocks) const {
    size_t n = 1;
    while (n < blocks.size() && blocks[n] == blocks[n - 1] + 1 && blocks[n] % slab_blocks_ != 0) ++n;
    return n;
}

}  // namespace quern
