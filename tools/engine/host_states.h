// HostStates: states of sequences in host memory of their own, beside those that run.
//
// The memory is taken in slabs as it is needed, up to a budget, the next slab by another thread before it is; on a GPU it is
// pinned. It consists of equal blocks: one for each KV page, which states share, and as many as a recurrent part needs. Pages
// that were copied once are not copied again as long as they stay where they are in the pool. A slab has the first parts of
// all its blocks (a layer's keys, say) side by side, then the second ones, as the pool has: neighbours are copied in one go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <future>
#include <span>
#include <vector>

#include "ggml-like/backend.h"
#include "tools/engine/state_pool.h"

namespace quern {

class HostStates {
  public:
    struct State {
        int64_t length = 0;
        std::vector<int32_t> pages, recurrent;  // blocks
    };

    /// `budget`: bytes at most.
    HostStates(Backend& backend, StatePool& pool, int64_t budget);
    ~HostStates();
    HostStates(const HostStates&) = delete;
    HostStates& operator=(const HostStates&) = delete;

    /// Begins to take memory, if there is none yet.
    void expect();
    /// Blocks that a state of these pages of the pool would take beside what is there already.
    int64_t fresh_blocks(const std::vector<int32_t>& pages, int64_t length);
    /// Blocks of a state that shares none.
    int64_t most_blocks(int64_t length) const;
    /// Takes memory until so many blocks are free. False: the budget or the machine's memory ends before.
    bool make_free(int64_t blocks);

    /// Copies a state whose length is a multiple of kPageTokens; the blocks must be free. What it copies from may be given to
    /// others after Backend::order_after_saves.
    State save(const Snapshot& from);
    State save(const SequenceState& from);
    /// A sequence that goes on from the state, which stays usable. Throws Error(memory) without a slot and the pages.
    SequenceState load(const State& state);
    void release(State& state);

    /// Blocks to fill from elsewhere; they must be free.
    std::vector<int32_t> take(int64_t blocks);
    /// Counts one more holder of a block.
    int32_t share(int32_t block);
    void drop(std::vector<int32_t>& blocks);
    /// The parts of a block, in the order of StatePool::page_parts, of one rank after the other.
    std::vector<StatePool::Part> parts(int32_t number) const;
    /// The recurrent part of a state, recurrent_bytes().
    void read_recurrent(const State& state, std::byte* to) const;
    void write_recurrent(const State& state, const std::byte* from) const;
    /// Sizes in bytes are of all ranks together.
    int64_t block_bytes() const { return backend_.ranks() * block_bytes_; }
    int64_t page_bytes() const { return backend_.ranks() * pool_.page_bytes(); }
    int64_t recurrent_bytes() const { return backend_.ranks() * pool_.recurrent_bytes(); }
    int64_t recurrent_blocks() const;
    int64_t used_bytes() const { return used_ * block_bytes(); }
    int64_t budget() const { return most_ * block_bytes(); }
    /// Waits until all that was saved is in the blocks.
    void finish() { backend_.finish_saves(); }

  private:
    struct Holders {
        int32_t count = 0;
        uint32_t serial = 0;  // rises whenever the block is taken
    };
    enum class Direction { to_host, to_pool };

    bool grow();
    void grow_ahead();
    int64_t next_slab() const;
    std::byte* take_slab(int64_t blocks) const;
    int32_t take_block();
    bool is_copy(const StatePool::Copy& copy) const;
    State save(const std::vector<int32_t>& pages, int64_t length, std::span<const StatePool::Part> recurrent);
    std::vector<BlockCopy> page_copies(std::span<const int32_t> pages, std::span<const int32_t> blocks,
                                       Direction direction) const;
    std::byte* place(int32_t block, size_t part) const;
    size_t run_length(std::span<const int32_t> blocks) const;
    std::vector<StatePool::Part> recurrent_parts(const State& state) const;
    std::vector<StatePool::Part> stretches(std::span<const int32_t> blocks) const;
    std::vector<BlockCopy> recurrent_copies(std::span<const StatePool::Part> parts,
                                            std::span<const int32_t> blocks, Direction direction) const;

    Backend& backend_;
    StatePool& pool_;
    std::vector<int64_t> parts_;                // bytes of each part of a block
    int64_t block_bytes_, most_, slab_blocks_;  // bytes of one rank
    int64_t used_ = 0;
    struct Slab {
        std::byte* memory;
        int64_t blocks;
    };
    std::vector<Slab> slabs_;
    std::vector<Holders> blocks_;
    std::vector<int32_t> free_;  // a heap: the lowest first
    std::future<std::byte*> growing_;
};

}  // namespace quern
