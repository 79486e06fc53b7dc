#include "tools/engine/draft_rows.h"

#include <algorithm>

#include "tools/engine/sequence.h"

namespace quern {

const char* draft_rows_name(DraftRows rows) {
    constexpr const char* kNames[] = {"frequent", "copied", "all"};
    return kNames[static_cast<size_t>(rows)];
}

DraftRows draft_rows_for(std::span<const int32_t> tokens, const std::optional<DraftTokens>& known) {
    if (!known) return DraftRows::frequent;
    const auto last = tokens.last(std::min(tokens.size(), kDraftRowsWindow));
    const auto few_missed = [&](DraftRows rows, int64_t most) {
        return std::ranges::count_if(last, [&](int32_t id) { return !known->has(rows, id); }) <= most;
    };
    if (few_missed(DraftRows::frequent, kMissedOfFrequent)) return DraftRows::frequent;
    if (known->whole_too && !few_missed(DraftRows::copied, kMissedOfCopied)) return DraftRows::all;
    return known->frequent == known->copied ? DraftRows::frequent
                                            : DraftRows::copied;  // one plan for one head
}

DraftRows draft_rows_for(const Sequence& sequence, const std::optional<DraftTokens>& known) {
    const auto& wanted = sequence.request.drafts.rows;
    return wanted ? *wanted : draft_rows_for(sequence.tokens, known);
}

}  // namespace quern
