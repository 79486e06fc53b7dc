// PrefixCache: states of earlier requests, found again by the tokens that led to them.
//
// A recurrent state cannot be shortened, so a state is kept at the last multiple of kPageTokens before each place
// where a later prompt may branch off (prompt_cuts.h). It holds tokens of a prompt only: rows of answers take
// another numeric path, so a later prompt reads an answer's tokens again. Lookup compares all token ids; no hash
// stands in for a prefix.
//
// All states are in host memory (host_states.h), within a byte budget. On a device those that were used last are in its own
// memory, too, where running sequences leave room: it is given up without a copy, and going on from it takes none.
//
// Several replicas may keep their states in the same host memory (kept_states.h): each finds what the others have left, as bits
// depend on the request alone. Then what is kept in a device's memory is each one's own.
//
// Eviction: GreedyDual-Size-Frequency (Cherkasova 1998), with the tokens that a hit saves as cost. A state is worth its tokens
// times the requests that went on from it or from what it goes on from, renewed by each hit, of what it goes on from, too. A
// state that goes on from none evicts only what is worth half of it: a single question, title or summary never evicts a
// conversation, but in the end, after many of them, what is no longer asked for goes. States of few new tokens are kept,
// too, so that the next turn of a conversation reads hardly anything again; where memory is short they go first.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tools/engine/host_states.h"
#include "tools/engine/kept_states.h"
#include "tools/engine/prefix_cache_stats.h"
#include "tools/engine/state_pool.h"

namespace quern {

class PrefixCache {
  public:
    /// `budget`: bytes of host memory. `shared`: with another replica; then the budget is that one's.
    PrefixCache(Backend& backend, StatePool& pool, int64_t budget, std::shared_ptr<KeptStates> shared = {});
    ~PrefixCache();
    PrefixCache(const PrefixCache&) = delete;
    PrefixCache& operator=(const PrefixCache&) = delete;

    using Entry = KeptStates::Entry;
    struct Match {
        std::shared_ptr<Entry> entry;
        int64_t common = 0;  // tokens shared with the most similar entry
    };
    /// The longest state whose tokens begin `prompt` and leave at least one of them to compute.
    Match find(std::span<const int32_t> prompt);
    /// Begins to take host memory for states of so many tokens.
    void expect(int64_t tokens);
    /// A sequence that goes on from what was found. Throws Error(memory) without a slot or pages. Without a slot: another replica
    /// has given it up meanwhile.
    SequenceState resume(const Match& match);

    /// Whether a state of these tokens is not kept yet.
    bool wants(std::span<const int32_t> tokens) const;
    /// Keeps the state of `s` after `tokens`, if there is room; may evict others. `conversation`: states of the same number other
    /// than 0 belong together; of those, one that goes on from none is worth least while there is another.
    void store(std::span<const int32_t> tokens, const SequenceState& s, uint64_t conversation = 0);

    struct Kept {
        std::shared_ptr<const Entry> entry;
        int64_t saved;  // tokens that a hit saves beyond the next shorter state
    };
    /// All kept states, the most valuable first.
    std::vector<Kept> by_worth() const;
    /// The blocks of a state, kept from being used anew until they are let go; nothing if it was given up meanwhile.
    std::optional<HostStates::State> hold(const Kept& kept);
    void let_go(HostStates::State& held);
    /// Keeps a state of an earlier process.
    void adopt(std::vector<int32_t> tokens, HostStates::State state, int64_t saved);

    /// Gives up the copy in the device's memory that was used least recently. False if none is left.
    bool evict_near();
    /// Gives up device memory until so many pages are free, if there is enough.
    void make_pages(int64_t pages);
    /// Releases the state that is worth least. False if none is left.
    bool evict();

    /// Begins to take the host memory that the next states need, if one was kept since the last call. For when nobody waits for a
    /// first token: the device's driver is busy meanwhile.
    void keep_ahead();
    /// Makes states others' whose copies have ended; `wait`: all of them. One replica alone has nothing to do.
    void settle(bool wait);
    /// The device has failed: gives up what was not copied to host memory, and touches neither again.
    void abandon();

    PrefixCacheStats stats() const;
    KeptReport report() const;
    HostStates& memory() { return memory_; }
    const std::shared_ptr<KeptStates>& shared() const { return kept_; }

  private:
    using Lock = std::lock_guard<std::mutex>;

    bool is_readable(const Entry& e) const;
    Entry* longest_prefix(std::span<const int32_t> tokens, const Entry* except = nullptr) const;
    static double gain(const Entry& e);
    bool make_room(const Entry& entry, const SequenceState& s);
    void set_saved(Entry& e, int64_t saved);
    void insert(std::shared_ptr<Entry> entry);
    bool give_up();
    void evict(Entry& entry, const char* why);
    Entry* least_worth() const;
    void touch(Entry& e);
    SequenceState load(Entry& e);
    std::optional<Snapshot> near_copy(const SequenceState& s);
    std::optional<Snapshot>& near(Entry& e) const;
    void drop_near(Entry& e);
    bool drop_oldest_near();
    void free_pages(int64_t pages);
    void release_orphans();
    void settle_all();
    void note_drop(int64_t tokens, const char* why);

    Backend& backend_;
    StatePool& pool_;
    std::shared_ptr<KeptStates> kept_;
    HostStates memory_;
    size_t me_;
    int64_t saving_ = 0;  // entries whose copies run, if others share them
    bool abandoned_ = false, used_memory_ = false;
    int64_t near_ = 0, hits_ = 0, misses_ = 0, loaded_ = 0;
};

}  // namespace quern
