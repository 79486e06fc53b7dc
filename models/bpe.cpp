#include "models/bpe.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
constexpr int32_t kGone = -1;
constexpr int32_t kEnd = -1;

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, std::span<const MergeRule> rules, int32_t vocab)
    : byte_ids_(byte_ids), first_(static_cast<size_t>(vocab) + 1, 0) {
    CHECK(rules.size() < kNone, "[bpe] {} merge rules are too many", rules.size());
    // Counting sort by left, then a small sort by right inside each group.
    for (const MergeRule& rule : rules) ++first_[static_cast<size_t>(rule.left) + 1];
    for (size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
    entries_.resize(rules.size());
    std::vector<uint32_t> fill(first_.begin(), first_.end() - 1);
    for (size_t rank = 0; rank < rules.size(); ++rank) {
        const MergeRule& rule = rules[rank];
        entries_[fill[rule.left]++] = {rule.right, rule.result, static_cast<uint32_t>(rank)};
    }
    for (int32_t left = 0; left < vocab; ++left) {
        // Equal pairs: the highest rank first, which is the one that find returns.
        std::sort(entries_.begin() + first_[left], entries_.begin() + first_[left + 1],
                  [](const Entry& a, const Entry& b) {
                      return a.right != b.right ? a.right < b.right : a.rank > b.rank;
                  });
    }
}

const Bpe::Entry* Bpe::find(int32_t left, int32_t right) const {
    const Entry* begin = entries_.data() + first_[left];
    const Entry* end = entries_.data() + first_[left + 1];
    const Entry* entry =
        std::lower_bound(begin, end, right, [](const Entry& e, int32_t value) { return e.right < value; });
    return entry != end && entry->right == right ? entry : nullptr;
}

/// Looks up the merge of symbol `at` with its next one and queues it.
void Bpe::refresh(Scratch& scratch, int32_t at) const {
    Scratch::Symbol& symbol = scratch.symbols[at];
    symbol.rank = kNone;
    if (symbol.next == kEnd) return;
    const Entry* entry = find(symbol.id, scratch.symbols[symbol.next].id);
    if (!entry) return;
    symbol.rank = entry->rank;
    scratch.queue.push_back(static_cast<uint64_t>(entry->rank) << 32 | static_cast<uint32_t>(at));
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const {
    static_assert(offsetof(Scratch::Known, length) == 15 && offsetof(Scratch::Known, ids) == 16);
    Scratch::Known wanted{};
    if (piece.size() < 2 || piece.size() > wanted.bytes.size()) return merge(piece, scratch, out);
    std::memcpy(wanted.bytes.data(), piece.data(), piece.size());
    wanted.length = static_cast<uint8_t>(piece.size());
    std::array<uint64_t, 2> words{};
    std::memcpy(words.data(), &wanted, sizeof words);
    const uint64_t mixed = (words[0] ^ words[1] * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
    Scratch::Known& known = scratch.known[mixed >> 32 & (scratch.known.size() - 1)];
    if (std::memcmp(&known, &wanted, sizeof words) == 0) {
        out.insert(out.end(), known.ids.begin(), known.ids.begin() + known.count);
        return;
    }
    const size_t before = out.size();
    merge(piece, scratch, out);
    if (out.size() - before > known.ids.size()) return;
    wanted.count = static_cast<uint32_t>(out.size() - before);
    std::copy(out.begin() + static_cast<ptrdiff_t>(before), out.end(), wanted.ids.begin());
    known = wanted;
}

void Bpe::merge(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const {
    if (piece.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
        FAIL(usage, "[tokenizer] a single word of {} bytes is too long", piece.size());
    }
    const auto length = static_cast<int32_t>(piece.size());
    auto& symbols = scratch.symbols;
    auto& queue = scratch.queue;
    symbols.resize(piece.size());
    queue.clear();
    for (int32_t i = 0; i < length; ++i) {
        symbols[i] = {byte_ids_[static_cast<unsigned char>(piece[i])], i - 1, i + 1 < length ? i + 1 : kEnd,
                      kNone};
    }
    for (int32_t i = 0; i + 1 < length; ++i) refresh(scratch, i);
    std::make_heap(queue.begin(), queue.end(), std::greater<>());
    while (!queue.empty()) {
        std::pop_heap(queue.begin(), queue.end(), std::greater<>());
        const uint64_t top = queue.back();
        queue.pop_back();
        const auto at = static_cast<int32_t>(top & 0xffffffffu);
        Scratch::Symbol& symbol = symbols[at];
        // Stale entries: the symbol was swallowed, or its neighbour changed and with it the rank.
        if (symbol.id == kGone || symbol.rank != static_cast<uint32_t>(top >> 32)) continue;
        Scratch::Symbol& swallowed = symbols[symbol.next];
        symbol.id = find(symbol.id, swallowed.id)->result;
        symbol.next = swallowed.next;
        swallowed.id = kGone;
        if (symbol.next != kEnd) symbols[symbol.next].previous = at;
        const auto push_heap = [&](size_t before) {
            if (queue.size() != before) std::push_heap(queue.begin(), queue.end(), std::greater<>());
        };
        size_t before = queue.size();
        refresh(scratch, at);
        push_heap(before);
        if (symbol.previous != kEnd) {
            before = queue.size();
            refresh(scratch, symbol.previous);
            push_heap(before);
        }
    }
    for (int32_t at = length ? 0 : kEnd; at != kEnd; at = symbols[at].next) out.push_back(symbols[at].id);
}

}  // namespace quern
