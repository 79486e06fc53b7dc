// Which rows of the head drafts of a text are chosen from: the fewest that name nearly all of its last tokens.
//
// Rows that are read take time: of the 35B on an H200, for each token that an MTP layer drafts, those of frequent tokens 18 us by
// their bytes, all that have a copy 47, the model's head 234, beside 40 for all else. A token without a row ends each draft that
// comes to it. So what a round costs is learnt by the rows that its drafts need (draft_length.h), and texts in several languages that
// take turns each get the drafts that pay for them.
#pragma once

#include <cstdint>
#include <span>

#include "models/model.h"

namespace quern {

struct Sequence;

/// Tokens that are looked at, and how many of them may have no row.
inline constexpr size_t kDraftRowsWindow = 128;
inline constexpr int64_t kMissedOfFrequent = 4, kMissedOfCopied = 16;

/// frequent, copied, all.
const char* draft_rows_name(DraftRows rows);

/// tokens: of a sequence, so far. known: ModelInfo::draft_tokens; none: any choice is the model's head, DraftRows::frequent. Plans for
/// other rows than those of frequent tokens are made when a text first needs them.
DraftRows draft_rows_for(std::span<const int32_t> tokens, const std::optional<DraftTokens>& known);
/// The same for all tokens that a sequence has, or what its request wants.
DraftRows draft_rows_for(const Sequence& sequence, const std::optional<DraftTokens>& known);

}  // namespace quern
