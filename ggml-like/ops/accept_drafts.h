// accept_drafts: how many rows of a step that verifies drafts were computed with the tokens that a greedy choice takes
//
// ids I32 [T] the step's tokens, as embed reads them (drafts: OtherRows of ids, or none), top I32 [T, kTopWords] of all its rows
// (logits_top) -> chosen[slots[s]] I32 {rows, id} for each sequence s that has rows: the row after each of the first rows - 1
// has the token with the highest logit of the row before it; id is that token of the last of these rows. At least one row.
// ids, start, slots and source are inputs and the drafts state: a GPU reads them before the nodes before it have ended.
#pragma once

#include "ggml-like/ops/batch.h"
#include "ggml-like/ops/embed.h"

namespace quern {

/// inputs {ids, start, slots, top} and, if there are any, {source, rows} of drafts; no outputs; state {chosen I32 [slots, 2]}.
extern const Op kAcceptDrafts;

void accept_drafts(Graph& g, std::string_view name, const Batch& batch, const OtherRows& drafts, Tensor* top,
                   Tensor* chosen);

}  // namespace quern
