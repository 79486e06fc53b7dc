// Scheduler: which rows run next. Pure host code: knows sequences and a row budget, no tensors and no device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/engine/sequence.h"

namespace quern {

/// Rows of one sequence in a step: its tokens [begin, begin + count).
struct Slice {
    Sequence* sequence;
    int64_t begin;
    int64_t count;
    bool last;  // its newest token is in it: logits are needed to go on
};

/// Every sequence that is answering gets its one row first, so that prompts never hold answers up. Of what is
/// left of `step_tokens` the oldest prompt gets half, so that it always moves on; the rest goes to the
/// prompts with the fewest rows left, so that short ones do not wait for long ones, and then to the oldest
/// again. Slices end at cuts. Prompts that want all their logits share `prompt_logits`
/// rows. At least one row runs if anything is pending.
std::vector<Slice> next_batch(std::span<Sequence* const> running, int64_t step_tokens, int64_t prompt_logits);

}  // namespace quern
