#include "tools/engine/prefix_cache.h"

#include <algorithm>
#include <exception>
#include <utility>

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

std::shared_ptr<KeptStates> own_states(Backend& backend, StatePool& pool, int64_t budget) {
    return std::make_shared<KeptStates>(HostStates(backend, pool, budget).blocks());
}

}  // namespace

PrefixCache::PrefixCache(Backend& backend, StatePool& pool, int64_t budget,
                         std::shared_ptr<KeptStates> shared)
    : backend_(backend),
      pool_(pool),
      kept_(shared != nullptr ? std::move(shared) : own_states(backend, pool, budget)),
      memory_(backend, pool, kept_->blocks),
      me_(kept_->join()) {}

/// What is in host memory stays for the others.
PrefixCache::~PrefixCache() {
    if (abandoned_) return;
    const Lock lock(kept_->mutex);
    try {
        settle_all();
        release_orphans();
        for (const auto& e : kept_->entries)
            if (near(*e)) drop_near(*e);
        while (kept_->alone() && give_up()) {
        }
    } catch (const std::exception&) {  // the device has failed, which was reported
    }
}

/// Whether this replica may go on from it.
bool PrefixCache::is_readable(const Entry& e) const {
    return e.saving == KeptStates::kNobody || e.saving == me_;
}

std::optional<Snapshot>& PrefixCache::near(Entry& e) const {
    if (e.near.size() <= me_) e.near.resize(me_ + 1);
    return e.near[me_];
}

void PrefixCache::expect(int64_t tokens) {
    const Lock lock(kept_->mutex);
    memory_.expect(tokens);
}

PrefixCache::Match PrefixCache::find(std::span<const int32_t> prompt) {
    const Lock lock(kept_->mutex);
    memory_.expect(kPageTokens);
    Match match;
    std::vector<Entry*> prefixes;
    for (const auto& e : kept_->entries) {
        const int64_t common = common_prefix(prompt, e->tokens);
        match.common = std::max(match.common, common);
        if (common < e->length() || e->tokens.size() >= prompt.size() || !is_readable(*e)) continue;
        prefixes.push_back(e.get());
        if (match.entry == nullptr || e->length() > match.entry->length()) match.entry = e;
    }
    ++(match.entry != nullptr ? hits_ : misses_);
    ++kept_->changes;
    if (match.entry == nullptr) return match;
    ++match.entry->uses;
    for (Entry* e : prefixes) e->worth = std::max(e->worth, kept_->clock + gain(*e));
    return match;
}

void PrefixCache::touch(Entry& e) {
    e.last_use = ++kept_->uses;
    e.used = KeptStates::Clock::now();
}

SequenceState PrefixCache::resume(const Match& match) {
    HostStates::State held;
    SequenceState s;
    {
        const Lock lock(kept_->mutex);
        release_orphans();
        Entry& e = *match.entry;
        if (e.gone) return {};
        touch(e);
        if (near(e)) {
            free_pages(pool_.restored_pages());
            if (near(e)) return pool_.restore(*near(e));
        }
        s = load(e);
        if (kept_->alone()) return s;
        held = memory_.share(e.state);
    }
    // Until the copy has ended nobody may use the blocks anew. Of a single replica they are in its own order of work.
    try {
        backend_.synchronize();
    } catch (...) {
        let_go(held);
        throw;
    }
    let_go(held);
    return s;
}

/// From host memory.
SequenceState PrefixCache::load(Entry& e) {
    free_pages(e.length() / kPageTokens);
    SequenceState s = memory_.load(e.state);
    ++loaded_;
    near(e) = near_copy(s);
    return s;
}

/// A copy in the device's memory, in place of the one that was used least recently; none where it has no room.
std::optional<Snapshot> PrefixCache::near_copy(const SequenceState& s) {
    if (pool_.free_snapshots() == 0) drop_oldest_near();
    if (pool_.free_snapshots() == 0) return std::nullopt;
    try {
        Snapshot copy = pool_.snapshot(s);
        ++near_;
        return copy;
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::memory) throw;
        return std::nullopt;
    }
}

void PrefixCache::drop_near(Entry& e) {
    backend_.order_after_saves();  // which may still read its pages
    pool_.release(*near(e));
    near(e).reset();
    --near_;
    ++kept_->changes;
}

/// Copies whose states other replicas have given up.
void PrefixCache::release_orphans() {
    std::vector<Snapshot>& orphans = kept_->orphans[me_];
    if (orphans.empty()) return;
    backend_.order_after_saves();
    for (Snapshot& copy : orphans) pool_.release(copy);
    near_ -= static_cast<int64_t>(orphans.size());
    orphans.clear();
}

bool PrefixCache::drop_oldest_near() {
    release_orphans();
    Entry* oldest = nullptr;
    for (const auto& e : kept_->entries)
        if (near(*e) && (oldest == nullptr || e->last_use < oldest->last_use)) oldest = e.get();
    if (oldest == nullptr) return false;
    drop_near(*oldest);
    return true;
}

bool PrefixCache::evict_near() {
    const Lock lock(kept_->mutex);
    return drop_oldest_near();
}

void PrefixCache::free_pages(int64_t pages) {
    while (pool_.free_pages() < pages && drop_oldest_near()) {
    }
}

void PrefixCache::make_pages(int64_t pages) {
    if (pool_.free_pages() >= pages) return;  // nearly always, and in every step
    const Lock lock(kept_->mutex);
    release_orphans();
    free_pages(pages);
}

PrefixCache::Entry* PrefixCache::longest_prefix(std::span<const int32_t> tokens, const Entry* except) const {
    Entry* longest = nullptr;
    for (const auto& e : kept_->entries)
        if (e.get() != except && (longest == nullptr || e->tokens.size() > longest->tokens.size()) &&
            begins(e->tokens, tokens))
            longest = e.get();
    return longest;
}

bool PrefixCache::wants(std::span<const int32_t> tokens) const {
    const Lock lock(kept_->mutex);
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
    const Lock lock(kept_->mutex);
    release_orphans();
    const auto kept = std::make_shared<Entry>();
    Entry& entry = *kept;
    entry.tokens = {tokens.begin(), tokens.end()};
    entry.conversation = conversation;
    if (const Entry* before = longest_prefix(tokens); before != nullptr) {
        if (before->length() == s.length) return;  // another replica was faster
        entry.saved = s.length - before->length();
        entry.uses = before->uses;
    } else {
        const auto same = [&](const auto& e) { return e->conversation == conversation; };
        entry.saved = s.length;
        entry.side = conversation != 0 && std::any_of(kept_->entries.begin(), kept_->entries.end(), same);
    }
    if (!make_room(entry, s)) return;
    entry.worth = kept_->clock + gain(entry);
    near(entry) = near_copy(s);
    if (near(entry)) {
        entry.state = memory_.save(*near(entry));
    } else {
        entry.state = memory_.save(s);
        backend_.order_after_saves();
    }
    used_memory_ = true;
    if (!kept_->alone()) {
        entry.saving = me_;
        ++saving_;
    }
    for (const auto& e : kept_->entries)
        if (e->length() > entry.length() && e->length() - entry.length() < e->saved &&
            begins(tokens, e->tokens))
            set_saved(*e, e->length() - entry.length());
    ++kept_->stored;
    insert(kept);
}

/// Makes room in host memory. False: what is there is worth more.
bool PrefixCache::make_room(const Entry& entry, const SequenceState& s) {
    if (memory_.most_blocks(s.length) * memory_.block_bytes() > memory_.budget()) {
        note_drop(s.length, "not kept: larger than --cache-ram");
        ++kept_->refused;
        return false;
    }
    const double worth = kept_->clock + gain(entry) / (entry.uses == 0 ? 2 : 1);
    while (!memory_.make_free(memory_.fresh_blocks(s.pages, s.length))) {
        Entry* least = least_worth();
        if (least == nullptr || least->worth > worth) {
            kept_->clock = std::max(kept_->clock, worth);  // as if it had been kept and evicted at once
            note_drop(s.length, "not kept: --cache-ram is full of states that are worth more");
            ++kept_->refused;
            return false;
        }
        evict(*least, "--cache-ram was full, and it was worth least");
    }
    return true;
}

void PrefixCache::insert(std::shared_ptr<Entry> entry) {
    touch(*entry);
    kept_->entries.push_back(std::move(entry));
    ++kept_->changes;
}

void PrefixCache::adopt(std::vector<int32_t> tokens, HostStates::State state, int64_t saved) {
    const Lock lock(kept_->mutex);
    auto entry = std::make_shared<Entry>();
    entry->tokens = std::move(tokens);
    entry->state = std::move(state);
    entry->saved = saved;
    entry->worth = kept_->clock + gain(*entry);
    insert(std::move(entry));
}

/// Of those that this replica may evict.
PrefixCache::Entry* PrefixCache::least_worth() const {
    Entry* least = nullptr;
    for (const auto& e : kept_->entries)
        if (is_readable(*e) && (least == nullptr || e->worth < least->worth)) least = e.get();
    return least;
}

void PrefixCache::note_drop(int64_t tokens, const char* why) {
    kept_->dropped.push_front({tokens, why, KeptStates::Clock::now()});
    if (kept_->dropped.size() > kDroppedToTell) kept_->dropped.pop_back();
    ++kept_->changes;
}

void PrefixCache::evict(Entry& entry, const char* why) {
    if (entry.saving != KeptStates::kNobody) settle_all();  // before others use its blocks
    kept_->clock = std::max(kept_->clock, entry.worth);
    if (near(entry)) drop_near(entry);
    for (size_t r = 0; r < entry.near.size(); ++r)
        if (entry.near[r]) kept_->orphans[r].push_back(std::move(*entry.near[r]));
    for (const auto& e : kept_->entries)  // which save more without it
        if (e->length() > entry.length() && e->length() - entry.length() == e->saved &&
            begins(entry.tokens, e->tokens)) {
            const Entry* shorter = longest_prefix(entry.tokens, &entry);
            set_saved(*e, e->length() - (shorter != nullptr ? shorter->length() : 0));
        }
    memory_.release(entry.state);
    entry.gone = true;
    note_drop(entry.length(), why);
    const auto same = [&](const auto& e) { return e.get() == &entry; };
    kept_->entries.erase(std::find_if(kept_->entries.begin(), kept_->entries.end(), same));
    ++kept_->evicted;
}

/// What another replica still copies is not this one's to give up.
bool PrefixCache::give_up() {
    Entry* least = least_worth();
    if (least == nullptr) return false;
    evict(*least, "given up");
    return true;
}

bool PrefixCache::evict() {
    const Lock lock(kept_->mutex);
    return give_up();
}

void PrefixCache::keep_ahead() {
    if (!std::exchange(used_memory_, false) || abandoned_) return;
    const Lock lock(kept_->mutex);
    memory_.keep_ahead();
}

void PrefixCache::settle(bool wait) {
    if (saving_ == 0 || (!wait && !backend_.saves_ended())) return;
    memory_.finish();  // the wait is not the others'
    const Lock lock(kept_->mutex);
    settle_all();
}

void PrefixCache::settle_all() {
    if (saving_ == 0) return;
    memory_.finish();
    for (const auto& e : kept_->entries)
        if (e->saving == me_) e->saving = KeptStates::kNobody;
    saving_ = 0;
}

void PrefixCache::abandon() {
    const Lock lock(kept_->mutex);
    abandoned_ = true;
    saving_ = 0;
    kept_->orphans[me_].clear();
    std::vector<Entry*> lost;
    for (const auto& e : kept_->entries) {
        near(*e).reset();
        if (e->saving != me_) continue;
        e->saving = KeptStates::kNobody;  // so that nobody waits for it
        lost.push_back(e.get());
    }
    for (Entry* e : lost) evict(*e, "its device has failed");
}

}  // namespace quern
