// StatePool: memory that sequences keep between steps. KV pages are shared and reference-counted; recurrent state is
// in slots. Snapshots are in the same memory: on a device, copies in stream order that nobody waits for. HostStates
// keeps states outside of it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "ggml-like/backend.h"
#include "models/model.h"
#include "tools/engine/block_pool.h"

namespace quern {

/// What one sequence holds, until StatePool::release.
struct SequenceState {
    int32_t slot = -1;
    std::vector<int32_t> pages;
    int64_t length = 0;  // tokens whose state is complete
    /// Of these, the last that are still in the slot's journal; the next step moves them into the recurrent state.
    int64_t journaled = 0;
};

/// A sequence's state at one length: the recurrent part copied bit for bit, the KV pages shared.
struct Snapshot {
    int64_t length = 0;
    std::vector<int32_t> pages;
    std::vector<std::byte*> recurrent;  // of each stage, in the backend's memory, layer after layer
};

class StatePool final : public StateViews {
  public:
    /// `snapshots`: how many may exist at the same time, if there are pages for them.
    StatePool(Backend& backend, const std::vector<StateSpec>& specs, int64_t slots, int64_t pages,
              int64_t snapshots = BlockPool::kAsNeeded);
    StatePool(const StatePool&) = delete;
    StatePool& operator=(const StatePool&) = delete;

    Tensor find(int layer, StateRole role) const override;
    bool has(int layer, StateRole role) const override;

    int64_t free_slots() const { return static_cast<int64_t>(free_slots_.size()); }
    int64_t free_pages() const { return static_cast<int64_t>(free_pages_.size()); }
    int64_t free_snapshots() const;
    int64_t bytes() const { return bytes_; }                      // without snapshots
    int64_t page_bytes() const { return page_bytes_; }            // of one page, all layers
    int64_t recurrent_bytes() const { return recurrent_bytes_; }  // of a snapshot's recurrent part
    /// Pages that `restore` takes: the last one is copied where an MTP layer writes its last token's keys and values,
    /// which depend on the token after it.
    int64_t restored_pages() const { return open_tokens_; }

    /// A fresh sequence of length 0. Throws Error(memory) if no slot is free.
    SequenceState acquire();
    /// Makes room for `tokens` tokens in all. Throws Error(memory) if pages run out; `s` then stays valid.
    void grow(SequenceState& s, int64_t tokens);
    /// Shares the full pages and copies a partial last one. The journal must be empty. Throws Error(memory) without room for a snapshot or
    /// a page for that copy.
    Snapshot snapshot(const SequenceState& s);
    /// A sequence that continues from a snapshot; the snapshot stays usable. Throws Error(memory) without restored_pages().
    SequenceState restore(const Snapshot& snapshot);
    /// Reads the recurrent part of a snapshot, `recurrent_bytes()` bytes.
    void read_recurrent(const Snapshot& snapshot, std::byte* to) const;
    /// A sequence of this length whose contents are undefined, for a state from elsewhere. Throws Error(memory).
    SequenceState acquire_for(int64_t length);
    /// Keeps the pages of a state whose length is a multiple of kPageTokens from being used anew; the slot stays the
    /// sequence's.
    SequenceState hold(const SequenceState& s);
    void let_go(SequenceState& held);
    void release(SequenceState& s);
    void release(Snapshot& snapshot);

    /// A stretch of the pool's memory.
    struct Part {
        std::byte* data;
        int64_t bytes;
    };
    /// What page 0 consists of; page n is n times each part's bytes further.
    std::vector<Part> page_parts() const;
    /// The recurrent state of a slot, as snapshots copy it: `recurrent_bytes()` in all.
    std::vector<Part> recurrent_parts(int32_t slot) const;
    /// The same of a snapshot.
    std::vector<Part> recurrent_parts(const Snapshot& snapshot) const;
    /// Pages of a state of so many tokens that nobody writes any more.
    int64_t final_pages(int64_t length) const;

    /// A copy of a page elsewhere, which is forgotten when the page is used anew.
    struct Copy {
        int32_t block = -1;
        uint32_t serial = 0;
    };
    Copy& copy_of(int32_t page) { return copies_[static_cast<size_t>(page)]; }

  private:
    struct Block {
        StateSpec spec;
        Tensor tensor;
        int64_t item_bytes;  // of one slot or page

        /// A sequence's recurrent state; journals hold what is not yet part of it.
        bool copied() const { return !spec.paged && !spec.transient(); }
    };

    int32_t take_slot();
    int32_t take_page();
    void drop_pages(std::vector<int32_t>& pages);
    /// Shares the full pages of `from` and copies the partial one; `length` tokens.
    std::vector<int32_t> share_pages(const std::vector<int32_t>& from, int64_t length);
    std::byte* item(const Block& block, int64_t index) const;

    /// One allocation on each stage for all its state of a kind: pages or slots.
    void place(bool paged, int64_t outer, const char* what);
    void place(int stage, bool paged, int64_t outer, const char* what);
    void copy_recurrent(const SequenceState& s, const Snapshot& snapshot, bool to_snapshot) const;

    Backend& backend_;
    std::vector<std::shared_ptr<void>> memory_;
    std::vector<Block> blocks_;
    std::map<std::pair<int, StateRole>, size_t> index_;
    std::vector<int32_t> free_slots_;
    std::vector<int32_t>
        free_pages_;  // a heap: the lowest is taken first, so that pages of a sequence are neighbours
    std::vector<int32_t> page_users_;
    std::vector<Copy> copies_;
    int64_t bytes_ = 0, page_bytes_ = 0, recurrent_bytes_ = 0;
    int64_t open_tokens_ = 0;  // the last tokens of a sequence whose keys and values are not all complete
    struct Kept {
        std::unique_ptr<BlockPool> pool;
        int64_t bytes;  // of a snapshot
    };
    std::vector<Kept> kept_;  // of each stage
};

/// Those of one stage.
std::vector<StateSpec> of_stage(const std::vector<StateSpec>& specs, int stage);

/// Bytes of one page over all layers (64 tokens of KV), and of one slot.
int64_t page_bytes(const std::vector<StateSpec>& specs);
int64_t slot_bytes(const std::vector<StateSpec>& specs);
/// Bytes of a slot that snapshots copy: all but its journal.
int64_t recurrent_bytes(const std::vector<StateSpec>& specs);
/// Bytes that StatePool allocates for so many pages, slots or snapshots.
int64_t pages_bytes(const std::vector<StateSpec>& specs, int64_t pages);
int64_t slots_bytes(const std::vector<StateSpec>& specs, int64_t slots);
int64_t snapshots_bytes(const std::vector<StateSpec>& specs, int64_t snapshots);
/// The tensor of a spec with `outer` pages or slots in front; no data yet.
Tensor state_tensor(const StateSpec& spec, int64_t outer);

}  // namespace quern
