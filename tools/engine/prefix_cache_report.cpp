// What a prefix cache holds: for people, and for the file that it is saved in.
#include <algorithm>

#include "tools/engine/prefix_cache.h"

namespace quern {
namespace {

using Entries = std::vector<std::shared_ptr<KeptStates::Entry>>;

/// The most valuable first.
Entries in_order(const KeptStates& kept) {
    Entries order(kept.entries.begin(), kept.entries.end());
    std::stable_sort(order.begin(), order.end(),
                     [](const auto& a, const auto& b) { return a->worth > b->worth; });
    return order;
}

}  // namespace

std::vector<PrefixCache::Kept> PrefixCache::by_worth() const {
    const Lock lock(kept_->mutex);
    std::vector<Kept> out;
    for (const auto& e : in_order(*kept_))
        if (is_readable(*e)) out.push_back({e, e->saved});
    return out;
}

std::optional<HostStates::State> PrefixCache::hold(const Kept& kept) {
    const Lock lock(kept_->mutex);
    if (kept.entry->gone) return std::nullopt;
    return memory_.share(kept.entry->state);
}

void PrefixCache::let_go(HostStates::State& held) {
    const Lock lock(kept_->mutex);
    memory_.release(held);
}

PrefixCacheStats PrefixCache::stats() const {
    const Lock lock(kept_->mutex);
    return {.snapshots = static_cast<int64_t>(kept_->entries.size()),
            .bytes = memory_.used_bytes(),
            .budget = memory_.budget(),
            .near = near_,
            .hits = hits_,
            .misses = misses_,
            .loaded = loaded_,
            .stored = kept_->stored,
            .evicted = kept_->evicted,
            .refused = kept_->refused,
            .changes = kept_->changes};
}

KeptReport PrefixCache::report() const {
    const auto since = [now = KeptStates::Clock::now()](KeptStates::Clock::time_point then) {
        return std::chrono::duration<double>(now - then).count();
    };
    const Lock lock(kept_->mutex);
    KeptReport report;
    for (const auto& e : in_order(*kept_)) {
        const auto blocks = static_cast<int64_t>(e->state.pages.size() + e->state.recurrent.size());
        const bool near = std::any_of(e->near.begin(), e->near.end(), [](const auto& n) { return !!n; });
        report.kept.push_back({.tokens = e->length(),
                               .bytes = blocks * memory_.block_bytes(),
                               .where = near ? "device and host memory" : "host memory",
                               .uses = e->uses,
                               .idle_seconds = since(e->used)});
    }
    for (const KeptStates::Dropped& d : kept_->dropped)
        report.dropped.push_back({d.tokens, d.why, since(d.at)});
    return report;
}

}  // namespace quern
