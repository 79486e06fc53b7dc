// HostBlocks: equal blocks of host memory, which states of sequences consist of; several engines may share them.
//
// The memory is taken in slabs as it is needed, up to a budget, the next slabs by another thread before they are; on a GPU it is
// pinned. A slab has the first parts of all its blocks (a layer's keys, say) side by side, then the second ones, as a pool of
// pages has: neighbours are copied in one go. Not thread-safe: engines that share it take turns (kept_states.h).
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <future>
#include <mutex>
#include <span>
#include <vector>

#include "ggml-like/backend.h"

namespace quern {

class HostBlocks {
  public:
    /// `parts`: bytes of each part of a block, of one rank; `ranks` have as much each. `budget`: bytes at most.
    HostBlocks(std::vector<int64_t> parts, int ranks, int64_t budget);
    /// All backends that asked for memory must still be there.
    ~HostBlocks();
    HostBlocks(const HostBlocks&) = delete;
    HostBlocks& operator=(const HostBlocks&) = delete;

    /// Begins to take so many blocks, if there are none yet.
    void expect(Backend& backend, int64_t blocks);
    /// Takes memory until so many blocks are free. False: the budget or the machine's memory ends before.
    bool make_free(Backend& backend, int64_t blocks);
    /// Begins to take the next slabs, if the free blocks are fewer than were needed last and one has: what follows a large state
    /// is often a small one, and need not wait.
    void keep_ahead(Backend& backend);

    int32_t take();
    /// Counts one more holder of a block.
    int32_t share(int32_t block);
    void drop(std::vector<int32_t>& blocks);
    /// Which use of the block this is: it rises whenever the block is taken.
    uint32_t serial(int32_t block) const { return holders(block).serial; }
    bool is_held(int32_t block, uint32_t serial) const {
        return holders(block).count > 0 && holders(block).serial == serial;
    }

    /// Where a part of a block is, of rank 0.
    std::byte* place(int32_t block, size_t part) const;
    /// How many of the first blocks are neighbours in one slab.
    size_t run_length(std::span<const int32_t> blocks) const;
    const std::vector<int64_t>& parts() const { return parts_; }
    int64_t rank_bytes() const { return rank_bytes_; }  // of a block, of one rank
    int64_t block_bytes() const { return ranks_ * rank_bytes_; }
    int64_t used_bytes() const { return used_ * block_bytes(); }
    int64_t budget() const { return most_ * block_bytes(); }

  private:
    struct Holders {
        int32_t count = 0;
        uint32_t serial = 0;
    };
    struct Slab {
        std::byte* memory = nullptr;
        int64_t blocks = 0;
        Backend* of = nullptr;
    };

    const Holders& holders(int32_t block) const { return blocks_[static_cast<size_t>(block)]; }
    bool grow(Backend& backend);
    void grow_ahead(Backend& backend, int64_t blocks);
    std::vector<Slab> grown(bool wait);
    void take_ahead(Backend& backend, int64_t blocks, int64_t left);
    Slab take_slab(Backend& backend, int64_t blocks) const;
    void add(const Slab& slab);
    int64_t left() const { return most_ - static_cast<int64_t>(blocks_.size()); }  // to take, in blocks

    std::vector<int64_t> parts_;
    int ranks_;
    int64_t rank_bytes_, most_, slab_blocks_;
    int64_t used_ = 0, needed_ = 0;  // blocks; free ones that were asked for last
    std::vector<Slab> slabs_;
    std::vector<Holders> blocks_;
    std::vector<int32_t> free_;  // a heap: the lowest first

    /// What another thread takes, slab by slab.
    struct Ahead {
        std::mutex mutex;
        std::condition_variable changed;
        std::vector<Slab> slabs;  // that nobody has added yet
        bool ended = false;
    };
    Ahead ahead_;
    std::future<void> growing_;  // valid until all that it took was added
};

}  // namespace quern
