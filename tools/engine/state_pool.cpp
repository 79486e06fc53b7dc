#include "tools/engine/state_pool.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "ggml-like/check.h"
#include "ggml-like/ops/batch.h"

namespace quern {
namespace {

const char* role_name(StateRole role) {
    constexpr const char* kNames[] = {"key",       "value",     "conv",      "delta",  "hidden",
                                      "journal_k", "journal_u", "journal_g", "drafts", "chosen"};
    return kNames[static_cast<size_t>(role)];
}

int64_t sum_bytes(const std::vector<StateSpec>& specs, bool paged) {
    int64_t total = 0;
    for (const StateSpec& s : specs)
        if (s.paged == paged) total += s.bytes();
    return total;
}

int64_t aligned(int64_t bytes) { return (bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment; }

int64_t aligned_sum(const std::vector<StateSpec>& specs, bool paged, int64_t outer) {
    int64_t total = 0;
    for (const StateSpec& s : specs)
        if (s.paged == paged) total += aligned(outer * s.bytes());
    return total;
}

std::vector<int32_t> all_free(int64_t n) {
    std::vector<int32_t> list(static_cast<size_t>(n));
    std::iota(list.rbegin(), list.rend(), 0);  // lowest is taken first
    return list;
}

}  // namespace

Tensor state_tensor(const StateSpec& spec, int64_t outer) {
    Tensor t;
    const std::string name = fmt::format("L{}.{}", spec.layer, role_name(spec.role));
    std::copy_n(name.data(), std::min(name.size(), sizeof t.name - 1), t.name);
    t.dtype = spec.dtype;
    t.place = Place::state;
    t.rank = static_cast<int>(spec.shape.size()) + 1;
    t.shape[0] = outer;
    std::copy(spec.shape.begin(), spec.shape.end(), t.shape + 1);
    int64_t stride = 1;
    for (int i = t.rank; i-- > 0; stride *= t.shape[i]) t.stride[i] = stride;
    return t;
}

int64_t page_bytes(const std::vector<StateSpec>& specs) { return sum_bytes(specs, true); }
int64_t slot_bytes(const std::vector<StateSpec>& specs) { return sum_bytes(specs, false); }
int64_t recurrent_bytes(const std::vector<StateSpec>& specs) {
    int64_t total = 0;
    for (const StateSpec& s : specs)
        if (!s.paged && !s.transient()) total += s.bytes();
    return total;
}
int64_t pages_bytes(const std::vector<StateSpec>& specs, int64_t pages) {
    return aligned_sum(specs, true, pages);
}
int64_t slots_bytes(const std::vector<StateSpec>& specs, int64_t slots) {
    return aligned_sum(specs, false, slots);
}

int64_t snapshots_bytes(const std::vector<StateSpec>& specs, int64_t snapshots) {
    return snapshots * aligned(recurrent_bytes(specs));
}

std::vector<StateSpec> of_stage(const std::vector<StateSpec>& specs, int stage) {
    std::vector<StateSpec> own;
    for (const StateSpec& s : specs)
        if (s.stage == stage) own.push_back(s);
    return own;
}

StatePool::StatePool(Backend& backend, const std::vector<StateSpec>& specs, int64_t slots, int64_t pages,
                     int64_t snapshots)
    : backend_(backend),
      free_slots_(all_free(slots)),
      free_pages_(all_free(pages)),
      page_users_(static_cast<size_t>(pages), 0),
      copies_(static_cast<size_t>(pages)) {
    for (int stage = 0; stage < backend.stages(); ++stage) {
        const std::vector<StateSpec> own = of_stage(specs, stage);
        kept_.push_back({std::make_unique<BlockPool>(backend.of_stage(stage), snapshots_bytes(own, 1),
                                                     snapshots, "the states of earlier prompts"),
                         quern::recurrent_bytes(own)});
    }
    for (const StateSpec& spec : specs) {
        index_[{spec.layer, spec.role}] = blocks_.size();
        blocks_.push_back({spec, state_tensor(spec, spec.paged ? pages : slots), spec.bytes()});
        if (spec.paged) page_bytes_ += spec.bytes();
        if (spec.role == StateRole::hidden) open_tokens_ = 1;
    }
    recurrent_bytes_ = quern::recurrent_bytes(specs);
    std::make_heap(free_pages_.begin(), free_pages_.end(), std::greater<>());
    place(true, pages, "the KV cache");
    place(false, slots, "recurrent state");
}

void StatePool::place(bool paged, int64_t outer, const char* what) {
    for (int stage = 0; stage < backend_.stages(); ++stage) place(stage, paged, outer, what);
}

void StatePool::place(int stage, bool paged, int64_t outer, const char* what) {
    const auto own = [&](const Block& b) { return b.spec.paged == paged && b.spec.stage == stage; };
    int64_t total = 0;
    for (const Block& b : blocks_)
        if (own(b)) total += aligned(outer * b.item_bytes);
    void* memory = backend_.of_stage(stage).alloc(total, what);
    memory_.emplace_back(memory, [this](void* m) { backend_.free(m); });
    int64_t offset = 0;
    for (Block& b : blocks_) {
        if (!own(b)) continue;
        b.tensor.data = static_cast<std::byte*>(memory) + offset;
        offset += aligned(outer * b.item_bytes);
    }
    bytes_ += total;
}

bool StatePool::has(int layer, StateRole role) const { return index_.contains({layer, role}); }

Tensor StatePool::find(int layer, StateRole role) const {
    const auto it = index_.find({layer, role});
    CHECK(it != index_.end(), "[state] layer {} has no {} state", layer, role_name(role));
    return blocks_[it->second].tensor;
}

std::byte* StatePool::item(const Block& block, int64_t index) const {
    return static_cast<std::byte*>(block.tensor.data) + index * block.item_bytes;
}

int32_t StatePool::take_slot() {
    if (free_slots_.empty()) FAIL(memory, "no free sequence slot: all {} are in use", free_slots_.capacity());
    const int32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
}

SequenceState StatePool::acquire() {
    SequenceState s;
    s.slot = take_slot();
    // Nothing of the slot's earlier sequence may be seen, even if a kernel forgot that position 0 means fresh.
    for (const Block& b : blocks_)
        if (b.copied()) backend_.zero(item(b, s.slot), b.item_bytes);
    return s;
}

int32_t StatePool::take_page() {
    if (free_pages_.empty())
        FAIL(memory, "the KV cache is full: all {} pages of {} tokens are in use", page_users_.size(),
             kPageTokens);
    std::pop_heap(free_pages_.begin(), free_pages_.end(), std::greater<>());
    const int32_t page = free_pages_.back();
    free_pages_.pop_back();
    page_users_[static_cast<size_t>(page)] = 1;
    copies_[static_cast<size_t>(page)] = {};
    return page;
}

void StatePool::grow(SequenceState& s, int64_t tokens) {
    while (static_cast<int64_t>(s.pages.size()) * kPageTokens < tokens) s.pages.push_back(take_page());
}

std::vector<int32_t> StatePool::share_pages(const std::vector<int32_t>& from, int64_t length) {
    std::vector<int32_t> pages;
    const int64_t full = length / kPageTokens;
    if (length % kPageTokens != 0) {  // first, since it may throw
        const int32_t copy = take_page();
        for (const Block& b : blocks_)
            if (b.spec.paged)
                backend_.copy(item(b, copy), item(b, from[static_cast<size_t>(full)]), b.item_bytes);
        pages.push_back(copy);
    }
    pages.insert(pages.begin(), from.begin(), from.begin() + full);
    for (int64_t i = 0; i < full; ++i) ++page_users_[static_cast<size_t>(pages[static_cast<size_t>(i)])];
    return pages;
}

Snapshot StatePool::snapshot(const SequenceState& s) {
    CHECK(s.journaled == 0, "[state] a snapshot of {} tokens, {} of them in the journal", s.length,
          s.journaled);
    Snapshot snapshot;
    snapshot.length = s.length;
    try {
        for (const Kept& kept : kept_) snapshot.recurrent.push_back(kept.pool->take());
        snapshot.pages = share_pages(s.pages, s.length);
    } catch (...) {
        release(snapshot);
        throw;
    }
    copy_recurrent(s, snapshot, true);
    return snapshot;
}

void StatePool::copy_recurrent(const SequenceState& s, const Snapshot& snapshot, bool to_snapshot) const {
    std::vector<std::byte*> at = snapshot.recurrent;
    for (const Block& b : blocks_) {
        if (!b.copied()) continue;
        std::byte*& kept = at[static_cast<size_t>(b.spec.stage)];
        std::byte* own = item(b, s.slot);
        backend_.copy(to_snapshot ? kept : own, to_snapshot ? own : kept, b.item_bytes);
        kept += b.item_bytes;
    }
}

SequenceState StatePool::restore(const Snapshot& snapshot) {
    SequenceState s;
    s.slot = take_slot();
    try {
        s.pages = share_pages(snapshot.pages, snapshot.length - open_tokens_);
    } catch (...) {
        release(s);
        throw;
    }
    s.length = snapshot.length;
    copy_recurrent(s, snapshot, false);
    return s;
}

void StatePool::read_recurrent(const Snapshot& snapshot, std::byte* to) const {
    for (const Part& part : recurrent_parts(snapshot)) {
        backend_.download(to, part.data, part.bytes);
        to += part.bytes;
    }
}

SequenceState StatePool::acquire_for(int64_t length) {
    SequenceState s;
    s.slot = take_slot();
    try {
        grow(s, length);
    } catch (...) {
        release(s);
        throw;
    }
    s.length = length;
    return s;
}

std::vector<StatePool::Part> StatePool::page_parts() const {
    std::vector<Part> parts;
    for (const Block& b : blocks_)
        if (b.spec.paged) parts.push_back({item(b, 0), b.item_bytes});
    return parts;
}

std::vector<StatePool::Part> StatePool::recurrent_parts(int32_t slot) const {
    std::vector<Part> parts;
    for (const Block& b : blocks_)
        if (b.copied()) parts.push_back({item(b, slot), b.item_bytes});
    return parts;
}

std::vector<StatePool::Part> StatePool::recurrent_parts(const Snapshot& snapshot) const {
    std::vector<Part> parts;
    for (size_t stage = 0; stage < kept_.size(); ++stage)
        if (kept_[stage].bytes > 0) parts.push_back({snapshot.recurrent[stage], kept_[stage].bytes});
    return parts;
}

int64_t StatePool::free_snapshots() const {
    int64_t least = kept_.front().pool->left();
    for (const Kept& kept : kept_) least = std::min(least, kept.pool->left());
    return least;
}

int64_t StatePool::final_pages(int64_t length) const { return (length - open_tokens_) / kPageTokens; }

void StatePool::drop_pages(std::vector<int32_t>& pages) {
    for (int32_t page : pages) {
        if (--page_users_[static_cast<size_t>(page)] > 0) continue;
        free_pages_.push_back(page);
        std::push_heap(free_pages_.begin(), free_pages_.end(), std::greater<>());
    }
    pages.clear();
}

SequenceState StatePool::hold(const SequenceState& s) {
    return {.slot = s.slot,
            .pages = share_pages(s.pages, s.length),
            .length = s.length,
            .journaled = s.journaled};
}

void StatePool::let_go(SequenceState& held) {
    drop_pages(held.pages);
    held = {};
}

void StatePool::release(SequenceState& s) {
    drop_pages(s.pages);
    if (s.slot >= 0) free_slots_.push_back(s.slot);
    s = {};
}

void StatePool::release(Snapshot& snapshot) {
    drop_pages(snapshot.pages);
    for (size_t stage = 0; stage < snapshot.recurrent.size(); ++stage)
        kept_[stage].pool->give_back(snapshot.recurrent[stage]);
    snapshot = {};
}

}  // namespace quern
