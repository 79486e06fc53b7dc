#include "tools/engine/host_states.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "ggml-like/check.h"
#include "tools/engine/host_memory.h"
#include "tools/engine/page_tokens.h"

namespace quern {
namespace {

constexpr int64_t kSlabBytes = 128ll << 20;

/// Of a pool without pages a block is one piece that has room for a recurrent part.
std::vector<int64_t> part_sizes(const StatePool& pool) {
    std::vector<int64_t> sizes;
    for (const StatePool::Part& part : pool.page_parts()) sizes.push_back(part.bytes);
    if (sizes.empty()) sizes.push_back(std::max<int64_t>(pool.recurrent_bytes(), 1));
    return sizes;
}

}  // namespace

HostStates::HostStates(Backend& backend, StatePool& pool, int64_t budget)
    : backend_(backend),
      pool_(pool),
      parts_(part_sizes(pool)),
      block_bytes_(std::accumulate(parts_.begin(), parts_.end(), int64_t{0})),
      most_(budget / block_bytes()),
      slab_blocks_(std::clamp<int64_t>(kSlabBytes / block_bytes_, 1, std::max<int64_t>(most_, 1))) {}

HostStates::~HostStates() {
    backend_.finish_saves();
    if (growing_.valid())
        if (std::byte* slab = growing_.get(); slab != nullptr) slabs_.push_back({slab, 0});
    for (const Slab& slab : slabs_) backend_.free_host(slab.memory);
}

int64_t HostStates::recurrent_blocks() const {
    return (pool_.recurrent_bytes() + block_bytes_ - 1) / block_bytes_;
}

int64_t HostStates::most_blocks(int64_t length) const { return length / kPageTokens + recurrent_blocks(); }

bool HostStates::is_copy(const StatePool::Copy& copy) const {
    if (copy.block < 0) return false;
    const Holders& h = blocks_[static_cast<size_t>(copy.block)];
    return h.count > 0 && h.serial == copy.serial;
}

int64_t HostStates::fresh_blocks(const std::vector<int32_t>& pages, int64_t length) {
    int64_t fresh = most_blocks(length);
    for (int64_t i = 0; i < pool_.final_pages(length); ++i)
        fresh -= is_copy(pool_.copy_of(pages[static_cast<size_t>(i)]));
    return fresh;
}

/// Blocks of the next slab; 0: the budget ends.
int64_t HostStates::next_slab() const {
    return std::min(slab_blocks_, most_ - static_cast<int64_t>(blocks_.size()));
}

/// Null without memory.
std::byte* HostStates::take_slab(int64_t blocks) const {
    if (blocks * block_bytes() > host_memory_left() / 4) return nullptr;
    try {
        return static_cast<std::byte*>(
            backend_.alloc_host(blocks * block_bytes_, "states of earlier prompts"));
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::memory) throw;
        return nullptr;
    }
}

void HostStates::grow_ahead() {
    if (const int64_t blocks = next_slab(); blocks > 0 && !growing_.valid())
        growing_ = std::async(std::launch::async, [this, blocks] { return take_slab(blocks); });
}

void HostStates::expect() {
    if (slabs_.empty()) grow_ahead();
}

bool HostStates::grow() {
    const int64_t blocks = next_slab();
    if (blocks <= 0) return false;
    std::byte* slab = growing_.valid() ? growing_.get() : take_slab(blocks);
    if (slab == nullptr) {
        most_ = static_cast<int64_t>(blocks_.size());
        return false;
    }
    slabs_.push_back({slab, blocks});
    for (int64_t i = 0; i < blocks; ++i) {
        free_.push_back(static_cast<int32_t>(blocks_.size()));
        std::push_heap(free_.begin(), free_.end(), std::greater<>());
        blocks_.emplace_back();
    }
    return true;
}

bool HostStates::make_free(int64_t blocks) {
    while (static_cast<int64_t>(free_.size()) < blocks)
        if (!grow()) return false;
    return true;
}

int32_t HostStates::take_block() {
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

std::vector<int32_t> HostStates::take(int64_t blocks) {
    std::vector<int32_t> taken;
    for (int64_t i = 0; i < blocks; ++i) taken.push_back(take_block());
    return taken;
}

int32_t HostStates::share(int32_t block) {
    ++blocks_[static_cast<size_t>(block)].count;
    return block;
}

void HostStates::drop(std::vector<int32_t>& blocks) {
    for (const int32_t number : blocks) {
        if (--blocks_[static_cast<size_t>(number)].count > 0) continue;
        free_.push_back(number);
        std::push_heap(free_.begin(), free_.end(), std::greater<>());
        --used_;
    }
    blocks.clear();
}

void HostStates::release(State& state) {
    drop(state.pages);
    drop(state.recurrent);
    state.length = 0;
}

std::byte* HostStates::place(int32_t block, size_t part) const {
    const Slab& slab = slabs_[static_cast<size_t>(block / slab_blocks_)];
    const int64_t before =
        std::accumulate(parts_.begin(), parts_.begin() + static_cast<std::ptrdiff_t>(part), int64_t{0});
    return slab.memory + before * slab.blocks + block % slab_blocks_ * parts_[part];
}

std::vector<StatePool::Part> HostStates::parts(int32_t number) const {
    std::vector<StatePool::Part> out;
    for (int rank = 0; rank < backend_.ranks(); ++rank)
        for (size_t part = 0; part < parts_.size(); ++part)
            out.push_back(
                {static_cast<std::byte*>(backend_.memory_of(rank, place(number, part))), parts_[part]});
    return out;
}

/// How many of the first blocks are neighbours in one slab.
size_t HostStates::run_length(std::span<const int32_t> blocks) const {
    size_t n = 1;
    while (n < blocks.size() && blocks[n] == blocks[n - 1] + 1 && blocks[n] % slab_blocks_ != 0) ++n;
    return n;
}

/// Pages that are neighbours in the pool and in host memory are one copy for each part.
std::vector<BlockCopy> HostStates::page_copies(std::span<const int32_t> pages,
                                               std::span<const int32_t> blocks, Direction direction) const {
    std::vector<BlockCopy> copies;
    const std::vector<StatePool::Part> own = pool_.page_parts();
    for (size_t begin = 0, end = 0; begin < pages.size(); begin = end) {
        const size_t most = begin + run_length(blocks.subspan(begin));
        for (end = begin + 1; end < most && pages[end] == pages[end - 1] + 1; ++end) {
        }
        for (size_t part = 0; part < own.size(); ++part) {
            std::byte* host = place(blocks[begin], part);
            std::byte* here = own[part].data + pages[begin] * own[part].bytes;
            const int64_t bytes = static_cast<int64_t>(end - begin) * own[part].bytes;
            const bool out = direction == Direction::to_host;
            copies.push_back({out ? host : here, out ? here : host, bytes, bytes, bytes, 1});
        }
    }
    return copies;
}

/// The memory of these blocks in large pieces, for what is no page.
std::vector<StatePool::Part> HostStates::stretches(std::span<const int32_t> blocks) const {
    std::vector<StatePool::Part> out;
    for (size_t begin = 0; begin < blocks.size();) {
        const size_t count = run_length(blocks.subspan(begin));
        for (size_t part = 0; part < parts_.size(); ++part)
            out.push_back({place(blocks[begin], part), static_cast<int64_t>(count) * parts_[part]});
        begin += count;
    }
    return out;
}

std::vector<BlockCopy> HostStates::recurrent_copies(std::span<const StatePool::Part> parts,
                                                    std::span<const int32_t> blocks,
                                                    Direction direction) const {
    std::vector<BlockCopy> copies;
    const std::vector<StatePool::Part> all = stretches(blocks);
    size_t stretch = 0;
    int64_t used = 0;  // of this stretch
    for (const StatePool::Part& part : parts)
        for (int64_t done = 0; done < part.bytes;) {
            if (used == all[stretch].bytes) {
                ++stretch;
                used = 0;
            }
            const int64_t bytes = std::min(part.bytes - done, all[stretch].bytes - used);
            std::byte* host = all[stretch].data + used;
            std::byte* own = part.data + done;
            const bool out = direction == Direction::to_host;
            copies.push_back({out ? host : own, out ? own : host, bytes, bytes, bytes, 1});
            used += bytes;
            done += bytes;
        }
    return copies;
}

/// The recurrent part of a state, of one rank after the other.
std::vector<StatePool::Part> HostStates::recurrent_parts(const State& state) const {
    std::vector<StatePool::Part> out;
    for (int rank = 0; rank < backend_.ranks(); ++rank) {
        int64_t left = pool_.recurrent_bytes();
        for (const StatePool::Part& s : stretches(state.recurrent)) {
            out.push_back(
                {static_cast<std::byte*>(backend_.memory_of(rank, s.data)), std::min(left, s.bytes)});
            left -= out.back().bytes;
        }
    }
    return out;
}

void HostStates::read_recurrent(const State& state, std::byte* to) const {
    for (const StatePool::Part& part : recurrent_parts(state)) {
        std::memcpy(to, part.data, static_cast<size_t>(part.bytes));
        to += part.bytes;
    }
}

void HostStates::write_recurrent(const State& state, const std::byte* from) const {
    for (const StatePool::Part& part : recurrent_parts(state)) {
        std::memcpy(part.data, from, static_cast<size_t>(part.bytes));
        from += part.bytes;
    }
}

HostStates::State HostStates::save(const std::vector<int32_t>& pages, int64_t length,
                                   std::span<const StatePool::Part> recurrent) {
    CHECK(at_page_end(length), "[cache] a state of {} tokens would be saved", length);
    State state{.length = length, .pages = {}, .recurrent = take(recurrent_blocks())};
    std::vector<int32_t> fresh_pages, fresh_blocks;
    for (int64_t i = 0; i < length / kPageTokens; ++i) {
        const int32_t page = pages[static_cast<size_t>(i)];
        StatePool::Copy& copy = pool_.copy_of(page);
        const bool is_final = i < pool_.final_pages(length);
        if (is_final && is_copy(copy)) {
            state.pages.push_back(share(copy.block));
            continue;
        }
        const int32_t number = take_block();
        if (is_final) copy = {number, blocks_[static_cast<size_t>(number)].serial};
        state.pages.push_back(number);
        fresh_pages.push_back(page);
        fresh_blocks.push_back(number);
    }
    backend_.save(page_copies(fresh_pages, fresh_blocks, Direction::to_host));
    backend_.save(recurrent_copies(recurrent, state.recurrent, Direction::to_host));
    if (free_.size() < static_cast<size_t>(slab_blocks_)) grow_ahead();
    return state;
}

HostStates::State HostStates::save(const Snapshot& from) {
    return save(from.pages, from.length, pool_.recurrent_parts(from));
}

HostStates::State HostStates::save(const SequenceState& from) {
    return save(from.pages, from.length, pool_.recurrent_parts(from.slot));
}

SequenceState HostStates::load(const State& state) {
    SequenceState s = pool_.acquire_for(state.length);
    backend_.load(page_copies(s.pages, state.pages, Direction::to_pool));
    backend_.load(recurrent_copies(pool_.recurrent_parts(s.slot), state.recurrent, Direction::to_pool));
    for (int64_t i = 0; i < pool_.final_pages(state.length); ++i) {
        const int32_t number = state.pages[static_cast<size_t>(i)];
        pool_.copy_of(s.pages[static_cast<size_t>(i)]) = {number,
                                                          blocks_[static_cast<size_t>(number)].serial};
    }
    return s;
}

}  // namespace quern
