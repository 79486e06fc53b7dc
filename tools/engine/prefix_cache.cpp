#include "tools/engine/prefix_cache.h"

#include <algorithm>

#include "ggml-like/check.h"

namespace quern {
namespace {

int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
    const auto end = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    return end.first - a.begin();
}

}  // namespace

PrefixCache::PrefixCache(StatePool& pool, int64_t budget, int64_t page_bytes, int64_t recurrent_bytes)
    : pool_(pool), page_bytes_(page_bytes), recurrent_bytes_(recurrent_bytes) {
    stats_.budget = budget;
}

PrefixCache::~PrefixCache() {
    while (evict()) {
    }
}

PrefixCache::Match PrefixCache::find(std::span<const int32_t> prompt) {
    Match match;
    Entry* best = nullptr;
    // The newest first: it is most likely the longest, so that shorter ones need not be compared.
    for (auto e = entries_.rbegin(); e != entries_.rend(); ++e) {
        if (best != nullptr && e->tokens.size() <= best->tokens.size()) continue;
        const int64_t common = common_prefix(prompt, e->tokens);
        match.common = std::max(match.common, common);
        const auto length = static_cast<int64_t>(e->tokens.size());
        if (common == length && length < static_cast<int64_t>(prompt.size())) best = &*e;
    }
    ++(best != nullptr ? stats_.hits : stats_.misses);
    if (best == nullptr) return match;
    best->worth = worth(*best);
    match.snapshot = &best->snapshot;
    return match;
}

int64_t PrefixCache::covered(std::span<const int32_t> tokens) const {
    size_t longest = 0;
    for (auto e = entries_.rbegin(); e != entries_.rend(); ++e)
        if (e->tokens.size() > longest && e->tokens.size() <= tokens.size() &&
            std::equal(e->tokens.begin(), e->tokens.end(), tokens.begin()))
            longest = e->tokens.size();
    return static_cast<int64_t>(longest);
}

bool PrefixCache::wants(std::span<const int32_t> tokens) const {
    return recurrent_bytes_ <= stats_.budget && covered(tokens) < static_cast<int64_t>(tokens.size());
}

double PrefixCache::worth(const Entry& e) const {
    const double bytes = static_cast<double>(recurrent_bytes_ + page_bytes_);
    return clock_ + static_cast<double>(e.saved) / bytes;
}

void PrefixCache::count_pages(const Snapshot& snapshot, int sign) {
    for (const int32_t page : snapshot.pages) {
        int& users = pages_[page];
        if (users == 0) stats_.bytes += page_bytes_;
        users += sign;
        if (users > 0) continue;
        stats_.bytes -= page_bytes_;
        pages_.erase(page);
    }
}

void PrefixCache::store(std::span<const int32_t> tokens, const SequenceState& s) {
    CHECK(static_cast<int64_t>(tokens.size()) == s.length, "[cache] {} tokens for a state of {}",
          tokens.size(), s.length);
    Entry entry{.tokens = {tokens.begin(), tokens.end()}, .snapshot = {}, .saved = 0, .worth = 0};
    entry.saved = s.length - covered(tokens);
    entry.worth = worth(entry);
    if (!make_room(entry.worth)) return;
    try {
        entry.snapshot = pool_.snapshot(s);
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::memory) throw;
        return;  // no memory, or no page to copy the last one to: running sequences need it more
    }
    insert(std::move(entry));
    ++stats_.stored;
    while (stats_.bytes > stats_.budget && evict()) {
    }
}

/// Makes room for one more snapshot of that worth, where their number is limited. False: all others are worth more.
bool PrefixCache::make_room(double worth) {
    while (pool_.free_snapshots() == 0) {
        const auto least = least_worth();
        if (least == entries_.end() || least->worth > worth) {
            clock_ = std::max(clock_, worth);  // as if it had been kept and evicted at once
            return false;
        }
        evict();
    }
    return true;
}

void PrefixCache::insert(Entry entry) {
    stats_.bytes += recurrent_bytes_;
    count_pages(entry.snapshot, 1);
    entries_.push_back(std::move(entry));
    stats_.snapshots = static_cast<int64_t>(entries_.size());
}

std::vector<PrefixCache::Kept> PrefixCache::by_worth() const {
    std::vector<const Entry*> order;
    for (const Entry& e : entries_) order.push_back(&e);
    std::stable_sort(order.begin(), order.end(),
                     [](const Entry* a, const Entry* b) { return a->worth > b->worth; });
    std::vector<Kept> out;
    for (const Entry* e : order) out.push_back({e->tokens, &e->snapshot, e->saved});
    return out;
}

bool PrefixCache::adopt(std::vector<int32_t> tokens, Snapshot snapshot, int64_t saved) {
    const auto fresh = std::count_if(snapshot.pages.begin(), snapshot.pages.end(),
                                     [&](int32_t page) { return !pages_.contains(page); });
    if (stats_.bytes + recurrent_bytes_ + fresh * page_bytes_ > stats_.budget) {
        pool_.release(snapshot);
        return false;
    }
    Entry entry{.tokens = std::move(tokens), .snapshot = std::move(snapshot), .saved = saved, .worth = 0};
    entry.worth = worth(entry);
    insert(std::move(entry));
    return true;
}

std::vector<PrefixCache::Entry>::iterator PrefixCache::least_worth() {
    return std::min_element(entries_.begin(), entries_.end(),
                            [](const Entry& a, const Entry& b) { return a.worth < b.worth; });
}

bool PrefixCache::evict() {
    if (entries_.empty()) return false;
    const auto least = least_worth();
    clock_ = least->worth;
    stats_.bytes -= recurrent_bytes_;
    count_pages(least->snapshot, -1);
    pool_.release(least->snapshot);
    entries_.erase(least);
    ++stats_.evicted;
    stats_.snapshots = static_cast<int64_t>(entries_.size());
    return true;
}

}  // namespace quern
