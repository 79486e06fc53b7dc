#include "tools/engine/prefix_cache.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "tools/engine/page_tokens.h"

namespace quern {
namespace {

constexpr size_t kDroppedToTell = 64;
constexpr int64_t kMostUses = 7;  // more do not make a state worth more
constexpr double kSideWorth = 0.125;

int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
    const auto end = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    return end.first - a.begin();
}

bool begins(std::span<const int32_t> prefix, std::span<const int32_t> tokens) {
    return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

}  // namespace

struct PrefixCache::Entry {
    std::vector<int32_t> tokens;
    HostStates::State state;
    std::optional<Snapshot> near;  // the same in the device's memory
    int64_t saved = 0;             // tokens that a hit saves beyond the next shorter entry
    int64_t uses = 0;
    uint64_t conversation = 0;
    bool side = false;  // its conversation has a state that it does not go on from
    double worth = 0;
    int64_t last_use = 0;
    Clock::time_point used{};

    int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

PrefixCache::PrefixCache(Backend& backend, StatePool& pool, int64_t budget)
    : backend_(backend), pool_(pool), memory_(backend, pool, budget) {}

PrefixCache::~PrefixCache() {
    while (evict()) {
    }
}

PrefixCache::Match PrefixCache::find(std::span<const int32_t> prompt) {
    memory_.expect();
    Match match;
    std::vector<Entry*> prefixes;
    for (Entry& e : entries_) {
        const int64_t common = common_prefix(prompt, e.tokens);
        match.common = std::max(match.common, common);
        if (common < e.length() || e.tokens.size() >= prompt.size()) continue;
        prefixes.push_back(&e);
        if (match.entry == nullptr || e.length() > match.entry->length()) match.entry = &e;
    }
    ++(match.entry != nullptr ? stats_.hits : stats_.misses);
    ++stats_.changes;
    if (match.entry == nullptr) return match;
    ++match.entry->uses;
    for (Entry* e : prefixes) e->worth = std::max(e->worth, clock_ + gain(*e));
    return match;
}

void PrefixCache::touch(Entry& e) {
    e.last_use = ++uses_;
    e.used = Clock::now();
}

SequenceState PrefixCache::resume(const Match& match) {
    Entry& e = *match.entry;
    touch(e);
    if (e.near) {
        make_pages(pool_.restored_pages());
        if (e.near) return pool_.restore(*e.near);
    }
    make_pages(e.length() / kPageTokens);
    SequenceState s = memory_.load(e.state);
    ++stats_.loaded;
    e.near = near_copy(s);
    return s;
}

/// A copy in the device's memory, in place of the one that was used least recently; none where it has no room.
std::optional<Snapshot> PrefixCache::near_copy(const SequenceState& s) {
    if (pool_.free_snapshots() == 0) evict_near();
    if (pool_.free_snapshots() == 0) return std::nullopt;
    try {
        Snapshot near = pool_.snapshot(s);
        ++stats_.near;
        return near;
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::memory) throw;
        return std::nullopt;
    }
}

void PrefixCache::drop_near(Entry& e) {
    backend_.order_after_saves();  // which may still read its pages
    pool_.release(*e.near);
    e.near.reset();
    --stats_.near;
    ++stats_.changes;
}

bool PrefixCache::evict_near() {
    Entry* oldest = nullptr;
    for (Entry& e : entries_)
        if (e.near && (oldest == nullptr || e.last_use < oldest->last_use)) oldest = &e;
    if (oldest == nullptr) return false;
    drop_near(*oldest);
    return true;
}

void PrefixCache::make_pages(int64_t pages) {
    while (pool_.free_pages() < pages && evict_near()) {
    }
}

PrefixCache::Entry* PrefixCache::longest_prefix(std::span<const int32_t> tokens, const Entry* except) const {
    const Entry* longest = nullptr;
    for (const Entry& e : entries_)
        if (&e != except && (longest == nullptr || e.tokens.size() > longest->tokens.size()) &&
            begins(e.tokens, tokens))
            longest = &e;
    return const_cast<Entry*>(longest);
}

bool PrefixCache::wants(std::span<const int32_t> tokens) const {
    const Entry* kept = longest_prefix(tokens);
    return kept == nullptr || kept->tokens.size() < tokens.size();
}

double PrefixCache::gain(const Entry& e) {
    const auto uses = static_cast<double>(1 + std::min(e.uses, kMostUses));
    return static_cast<double>(e.saved) * uses * (e.side && e.uses == 0 ? kSideWorth : 1);
}

void PrefixCache::set_saved(Entry& e, int64_t saved) {
    const double before = gain(e);
    e.saved = saved;
    e.worth += gain(e) - before;
}

void PrefixCache::store(std::span<const int32_t> tokens, const SequenceState& s, uint64_t conversation) {
    CHECK(static_cast<int64_t>(tokens.size()) == s.length, "[cache] {} tokens for a state of {}",
          tokens.size(), s.length);
    Entry entry{.tokens = {tokens.begin(), tokens.end()}, .conversation = conversation};
    if (const Entry* before = longest_prefix(tokens); before != nullptr) {
        entry.saved = s.length - before->length();
        entry.uses = before->uses;
    } else {
        entry.saved = s.length;
        entry.side = conversation != 0 && std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) {
                         return e.conversation == conversation;
                     });
    }
    if (!make_room(entry, s)) return;
    entry.worth = clock_ + gain(entry);
    entry.near = near_copy(s);
    if (entry.near) {
        entry.state = memory_.save(*entry.near);
    } else {
        entry.state = memory_.save(s);
        backend_.order_after_saves();
    }
    for (Entry& e : entries_)
        if (e.length() > entry.length() && e.length() - entry.length() < e.saved && begins(tokens, e.tokens))
            set_saved(e, e.length() - entry.length());
    ++stats_.stored;
    insert(std::move(entry));
}

/// Makes room in host memory. False: what is there is worth more.
bool PrefixCache::make_room(const Entry& entry, const SequenceState& s) {
    if (memory_.most_blocks(s.length) * memory_.block_bytes() > memory_.budget()) {
        note_drop(s.length, "not kept: larger than --cache-ram");
        ++stats_.refused;
        return false;
    }
    const double worth = clock_ + gain(entry) / (entry.uses == 0 ? 2 : 1);
    while (!memory_.make_free(memory_.fresh_blocks(s.pages, s.length))) {
        Entry* least = least_worth();
        if (least == nullptr || least->worth > worth) {
            clock_ = std::max(clock_, worth);  // as if it had been kept and evicted at once
            note_drop(s.length, "not kept: --cache-ram is full of states that are worth more");
            ++stats_.refused;
            return false;
        }
        evict(*least, "--cache-ram was full, and it was worth least");
    }
    return true;
}

void PrefixCache::insert(Entry entry) {
    touch(entry);
    entries_.push_back(std::move(entry));
    ++stats_.changes;
}

std::vector<PrefixCache::Kept> PrefixCache::by_worth() const {
    std::vector<const Entry*> order;
    for (const Entry& e : entries_) order.push_back(&e);
    std::stable_sort(order.begin(), order.end(),
                     [](const Entry* a, const Entry* b) { return a->worth > b->worth; });
    std::vector<Kept> out;
    for (const Entry* e : order) out.push_back({e->tokens, &e->state, e->saved});
    return out;
}

void PrefixCache::adopt(std::vector<int32_t> tokens, HostStates::State state, int64_t saved) {
    Entry entry{.tokens = std::move(tokens), .state = std::move(state), .saved = saved};
    entry.worth = clock_ + gain(entry);
    insert(std::move(entry));
}

PrefixCache::Entry* PrefixCache::least_worth() {
    const auto least = std::min_element(entries_.begin(), entries_.end(),
                                        [](const Entry& a, const Entry& b) { return a.worth < b.worth; });
    return least == entries_.end() ? nullptr : &*least;
}

void PrefixCache::note_drop(int64_t tokens, const char* why) {
    dropped_.push_front({tokens, why, Clock::now()});
    if (dropped_.size() > kDroppedToTell) dropped_.pop_back();
    ++stats_.changes;
}

void PrefixCache::evict(Entry& entry, const char* why) {
    clock_ = std::max(clock_, entry.worth);
    if (entry.near) drop_near(entry);
    for (Entry& e : entries_)  // which save more without it
        if (e.length() > entry.length() && e.length() - entry.length() == e.saved &&
            begins(entry.tokens, e.tokens)) {
            const Entry* shorter = longest_prefix(entry.tokens, &entry);
            set_saved(e, e.length() - (shorter != nullptr ? shorter->length() : 0));
        }
    memory_.release(entry.state);
    note_drop(entry.length(), why);
    const auto same = [&](const Entry& e) { return &e == &entry; };
    entries_.erase(std::find_if(entries_.begin(), entries_.end(), same));
    ++stats_.evicted;
}

bool PrefixCache::evict() {
    if (entries_.empty()) return false;
    evict(*least_worth(), "given up");
    return true;
}

PrefixCacheStats PrefixCache::stats() const {
    PrefixCacheStats stats = stats_;
    stats.snapshots = static_cast<int64_t>(entries_.size());
    stats.bytes = memory_.used_bytes();
    stats.budget = memory_.budget();
    return stats;
}

KeptReport PrefixCache::report() const {
    const auto since = [now = Clock::now()](Clock::time_point then) {
        return std::chrono::duration<double>(now - then).count();
    };
    std::vector<const Entry*> order;
    for (const Entry& e : entries_) order.push_back(&e);
    std::stable_sort(order.begin(), order.end(),
                     [](const Entry* a, const Entry* b) { return a->worth > b->worth; });
    KeptReport report;
    for (const Entry* e : order) {
        const auto blocks = static_cast<int64_t>(e->state.pages.size() + e->state.recurrent.size());
        report.kept.push_back({.tokens = e->length(),
                               .bytes = blocks * memory_.block_bytes(),
                               .where = e->near ? "device and host memory" : "host memory",
                               .uses = e->uses,
                               .idle_seconds = since(e->used)});
    }
    for (const Dropped& d : dropped_) report.dropped.push_back({d.tokens, d.why, since(d.at)});
    return report;
}

}  // namespace quern
