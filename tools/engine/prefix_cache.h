// PrefixCache: states of earlier requests, found again by the tokens that led to them.
//
// A recurrent state cannot be shortened, so a state is kept at the last multiple of kPageTokens before each place
// where a later prompt may branch off (prompt_cuts.h). It holds tokens of a prompt only: rows of answers take
// another numeric path, so a later prompt reads an answer's tokens again. Lookup compares all token ids; no hash
// stands in for a prefix. One byte budget counts the recurrent parts and the KV pages; pages shared by several
// snapshots count once.
//
// Eviction: GreedyDual-Size-Frequency (Cherkasova 1998), with the tokens that a hit saves as cost. A snapshot is
// worth its tokens per byte, renewed by each hit: a short request never evicts a long conversation, and what is no
// longer asked for is evicted in the end. States of few new tokens are kept, too, so that the next turn of a
// conversation reads hardly anything again; where memory is short they are evicted first, and the next turn
// continues from an earlier state.
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
    /// `page_bytes`: of one page; `recurrent_bytes`: of one sequence's recurrent state.
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

    /// Whether a state of these tokens is not kept yet and could fit the budget.
    bool wants(std::span<const int32_t> tokens) const;
    /// Keeps the state of `s` after `tokens`, if there is room; may evict others.
    void store(std::span<const int32_t> tokens, const SequenceState& s);

    /// A kept state; valid until the next call of another function.
    struct Kept {
        std::span<const int32_t> tokens;
        const Snapshot* snapshot;
        int64_t saved;  // tokens that a hit saves beyond the next shorter state
    };
    /// All kept states, the most valuable first.
    std::vector<Kept> by_worth() const;
    /// Keeps a state of an earlier process. False: it did not fit the budget and was released.
    bool adopt(std::vector<int32_t> tokens, Snapshot snapshot, int64_t saved);

    /// Releases the state that is worth least. False if none is left.
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
