// PrefixCache: states of earlier requests, found again by the tokens that led to them.
//
// A recurrent state cannot be cut back, so a state is kept where a later prompt may branch off, at the last
// multiple of kPageTokens before (prompt_cuts.h). All its tokens are of a prompt: rows of answers are
// computed along another numeric path, and a later prompt reads them again. Lookup compares token ids, all of
// them: no hash stands in for a prefix. One byte budget counts the recurrent parts and the KV pages; pages
// shared by several snapshots count once.
//
// Eviction: GreedyDual-Size-Frequency (Cherkasova 1998) with the tokens that a hit saves as cost. A snapshot
// is worth its tokens per byte, renewed by each hit, so that a short request never pushes out a long
// conversation, and what is no longer asked for falls behind in the end. A state of few new tokens is kept,
// too, so that the next turn of a conversation reads hardly anything again; where memory is short it is the
// first to go, and the next turn goes on from the one before it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tools/engine/prefix_cache_stats.h"
#include "tools/engine/state_pool.h"

namespace quern {

class PrefixCache {
  public:
    /// `page_bytes`, `recurrent_bytes`: of one page and of one sequence's recurrent state.
    PrefixCache(StatePool& pool, int64_t budget, int64_t page_bytes, int64_t recurrent_bytes);
    ~PrefixCache();
    PrefixCache(const PrefixCache&) = delete;
    PrefixCache& operator=(const PrefixCache&) = delete;

    struct Match {
        const Snapshot* snapshot = nullptr;  // valid until the next call of another function
        int64_t common = 0;                  // tokens shared with the most similar entry
    };
    /// The longest state whose tokens begin `prompt` and leave at least one of them to compute.
    Match find(std::span<const int32_t> prompt);

    /// Whether a state after these tokens is not there yet and could fit the budget.
    bool wants(std::span<const int32_t> tokens) const;
    /// Keeps the state of `s` after `tokens`; may evict others, and nothing is kept if there is no room.
    void store(std::span<const int32_t> tokens, const SequenceState& s);

    /// A state as it is kept; valid until the next call of another function.
    struct Kept {
        std::span<const int32_t> tokens;
        const Snapshot* snapshot;
        int64_t saved;  // tokens that a hit saves beyond the next shorter state
    };
    /// All of them, the most valuable first.
    std::vector<Kept> by_worth() const;
    /// Keeps a state of an earlier process. False: it does not fit the budget, and is given back.
    bool adopt(std::vector<int32_t> tokens, Snapshot snapshot, int64_t saved);

    /// Gives back what is worth least. False if nothing is left.
    bool evict();
    PrefixCacheStats stats() const { return stats_; }

  private:
    struct Entry {
        std::vector<int32_t> tokens;
        Snapshot snapshot;
        int64_t saved;  // tokens that a hit saves beyond the next shorter entry
        double worth;
    };

    /// Length of the longest entry that is a prefix of `tokens`, itself included.
    int64_t covered(std::span<const int32_t> tokens) const;
    double worth(const Entry& e) const;
    bool make_room(double worth);
    std::vector<Entry>::iterator least_worth();
    void insert(Entry entry);
    void count_pages(const Snapshot& snapshot, int sign);

    StatePool& pool_;
    int64_t page_bytes_, recurrent_bytes_;
    double clock_ = 0;  // rises to the worth of what was evicted last
    std::vector<Entry> entries_;
    std::map<int32_t, int> pages_;  // page -> snapshots that hold it
    PrefixCacheStats stats_;
};

}  // namespace quern
