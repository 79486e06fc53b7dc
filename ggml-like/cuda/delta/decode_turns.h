// The kernel of decode_turns.cu.
#pragma once

#include "ggml-like/cuda/delta/delta.h"

namespace quern::cuda::delta {

/// Whether two blocks fit an SM.
bool decode_turns_fits(const Context& context);
/// As delta_decode, for steps none of whose rows goes to the journal: the same bits.
void decode_turns(Context& context, const DeltaStep& step);

}  // namespace quern::cuda::delta
