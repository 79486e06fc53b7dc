// follow_draft: rows that catch up with a draft of which only the device knows yet how much was right, and the rows after them
//
// chosen I32 [slots, 2] {rows, id} (accept_drafts). Row t of the batch has the token ids[t], or drafts[source[t]] unless source[t] is
// -1. Of a sequence s with follows[s] = 1 only the first `rows` rows count: the last of these gets the token id, and all later
// positions are `rows` higher. Of others nothing changes.
//
// I32: ids, source [T]; drafts [N]; last_rows [S], each sequence's last row that counts, or null; later_positions and later_rope
// [L, S], or null.
#pragma once

#include "ggml-like/ops/batch.h"
#include "ggml-like/ops/embed.h"

namespace quern {

/// What it changes: each a tensor or null.
struct FollowedRows {
    Tensor *ids, *last_rows, *later_positions, *later_rope;
};

/// inputs {ids, row_sequence, start, slots, follows, source, drafts, then what there is of last_rows, later_positions, later_rope};
/// outputs {ids, the same}; state {chosen}, only read.
extern const Op kFollowDraft;

/// What there is of the three in a node's inputs or outputs.
struct FollowDraftParams {
    bool last_rows, later_positions, later_rope;
};

FollowedRows follow_draft(Graph& g, std::string_view name, const Batch& batch, const OtherRows& drafts,
                          const FollowedRows& from, Tensor* chosen);

}  // namespace quern
