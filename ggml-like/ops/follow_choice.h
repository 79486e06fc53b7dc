// follow_choice: where the rows of a sequence begin that follow a choice which only the device knows yet
//
// chosen I32 [slots, 2] {rows, id} (accept_drafts). Of a sequence s with follows[s] = 1 the first row gets the token id, and all
// its positions are `rows` higher; of others nothing changes. Outputs are ids and positions I32 [T].
#pragma once

#include <utility>

#include "ggml-like/ops/batch.h"

namespace quern {

/// inputs {ids, positions, row_sequence, start, slots, follows}; outputs {ids, positions}; state {chosen}, only read.
extern const Op kFollowChoice;

/// {ids, positions}
std::pair<Tensor*, Tensor*> follow_choice(Graph& g, std::string_view name, const Batch& batch,
                                          Tensor* chosen);

}  // namespace quern
