// HostStates: states of one engine's sequences in host memory of their own, beside those that run.
//
// A state is blocks (host_blocks.h): one for each KV page, which states share, and as many as a recurrent part needs. Pages
// that were copied once are not copied again as long as they stay where they are in the pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ggml-like/backend.h"
#include "tools/engine/host_blocks.h"
#include "tools/engine/state_pool.h"

namespace quern {

class HostStates {
  public:
    struct State {
        int64_t length = 0;
        std::vector<int32_t> pages, recurrent;  // blocks
    };

    /// Blocks of its own; `budget`: bytes at most.
    HostStates(Backend& backend, StatePool& pool, int64_t budget);
    /// Blocks that engines of the same layout share.
    HostStates(Backend& backend, StatePool& pool, std::shared_ptr<HostBlocks> blocks);
    ~HostStates();
    HostStates(const HostStates&) = delete;
    HostStates& operator=(const HostStates&) = delete;

    /// Begins to take memory for so many tokens, if there is none yet.
    void expect(int64_t tokens) { blocks_->expect(backend_, most_blocks(tokens)); }
    /// Begins to take the next memory, if little is left.
    void keep_ahead() { blocks_->keep_ahead(backend_); }
    /// Blocks that a state of these pages of the pool would take beside what is there already.
    int64_t fresh_blocks(const std::vector<int32_t>& pages, int64_t length);
    /// Blocks of a state that shares none.
    int64_t most_blocks(int64_t length) const;
    /// Takes memory until so many blocks are free. False: the budget or the machine's memory ends before.
    bool make_free(int64_t blocks) { return blocks_->make_free(backend_, blocks); }

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
    int32_t share(int32_t block) { return blocks_->share(block); }
    void drop(std::vector<int32_t>& blocks);
    /// One more holder of all its blocks.
    State share(const State& state);
    /// The parts of a block, in the order of StatePool::page_parts, of one rank after the other.
    std::vector<StatePool::Part> parts(int32_t number) const;
    /// The recurrent part of a state, recurrent_bytes().
    void read_recurrent(const State& state, std::byte* to) const;
    void write_recurrent(const State& state, const std::byte* from) const;
    /// Sizes in bytes are of all ranks together.
    int64_t block_bytes() const { return blocks_->block_bytes(); }
    int64_t page_bytes() const { return backend_.ranks() * pool_.page_bytes(); }
    int64_t recurrent_bytes() const { return backend_.ranks() * pool_.recurrent_bytes(); }
    int64_t recurrent_blocks() const;
    int64_t used_bytes() const { return blocks_->used_bytes(); }
    int64_t budget() const { return blocks_->budget(); }
    const std::shared_ptr<HostBlocks>& blocks() const { return blocks_; }
    /// Waits until all that was saved is in the blocks.
    void finish() { backend_.finish_saves(); }

  private:
    enum class Direction { to_host, to_pool };

    bool is_copy(const StatePool::Copy& copy) const;
    State save(const std::vector<int32_t>& pages, int64_t length, std::span<const StatePool::Part> recurrent);
    void await_stages();
    std::vector<BlockCopy> page_copies(std::span<const int32_t> pages, std::span<const int32_t> blocks,
                                       Direction direction) const;
    std::vector<StatePool::Part> recurrent_parts(const State& state) const;
    std::vector<StatePool::Part> stretches(std::span<const int32_t> blocks) const;
    std::vector<BlockCopy> recurrent_copies(std::span<const StatePool::Part> parts,
                                            std::span<const int32_t> blocks, Direction direction) const;

    Backend& backend_;
    StatePool& pool_;
    std::shared_ptr<HostBlocks> blocks_;
    bool dropped_ = false;  // blocks, since copies were waited for
};

}  // namespace quern
