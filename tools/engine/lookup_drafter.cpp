#include "tools/engine/lookup_drafter.h"

#include <algorithm>
#include <bit>

namespace quern {
namespace {

constexpr size_t kFewestBuckets = 1024;
/// Earlier occurrences that are compared: repetitive text has very many.
constexpr int kMostCompared = 16;
/// A longer match says no more about what comes next.
constexpr size_t kLongestMatch = 64;

}  // namespace

size_t TokenIndex::bucket(std::span<const int32_t> tokens, size_t end) const {
    uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a, a token at a time
    for (size_t i = end - kFewestMatched; i < end; ++i)
        hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0x100000001B3u;
    return (hash ^ hash >> 32) & (newest_.size() - 1);
}

/// Twice as many buckets as tokens, so that chains hold few runs of other tokens.
void TokenIndex::grow(std::span<const int32_t> tokens) {
    if (tokens.size() * 2 <= newest_.size()) return;
    newest_.assign(std::max(kFewestBuckets, std::bit_ceil(tokens.size() * 4)), 0);
    previous_.assign(std::min(previous_.size(), kFewestMatched), 0);
}

void TokenIndex::extend(std::span<const int32_t> tokens) {
    grow(tokens);
    if (previous_.size() < kFewestMatched) previous_.resize(kFewestMatched, 0);  // too short to end a run
    for (size_t end = previous_.size(); end <= tokens.size(); ++end) {
        int32_t& newest = newest_[bucket(tokens, end)];
        previous_.push_back(newest);
        newest = static_cast<int32_t>(end);
    }
}

size_t TokenIndex::find(std::span<const int32_t> tokens) const {
    const size_t size = tokens.size();
    if (size < kFewestMatched) return 0;
    size_t best = 0, longest = kFewestMatched - 1, end = static_cast<size_t>(previous_[size]);
    for (int i = 0; i < kMostCompared && end > 0; ++i, end = static_cast<size_t>(previous_[end])) {
        size_t length = 0;
        while (length < std::min(end, kLongestMatch) && tokens[end - 1 - length] == tokens[size - 1 - length])
            ++length;
        if (length <= longest) continue;
        longest = length;
        best = end;
    }
    return best;
}

void LookupDrafter::propose(std::span<Draft> drafts) {
    for (Draft& draft : drafts) {
        if (!draft.open_to(DrafterKind::lookup)) continue;
        const std::vector<int32_t>& tokens = draft.sequence->tokens;
        TokenIndex& index = indexes_[draft.sequence->id];
        index.extend(tokens);
        const size_t from = index.find(tokens);
        if (from == 0) continue;
        // What followed may be the newest tokens themselves: a loop goes on as it is.
        for (size_t i = from; draft.tokens.size() < static_cast<size_t>(draft.most); ++i)
            draft.tokens.push_back(i < tokens.size() ? tokens[i] : draft.tokens[i - tokens.size()]);
        const auto& copies = draft.sequence->request.copies;
        if (copies) draft.tokens.resize(std::min(draft.tokens.size(), copies(draft.tokens)));
    }
}

}  // namespace quern
