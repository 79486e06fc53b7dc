// The delta rule of answer steps with several rows of a sequence.
#pragma once

#include "ggml-like/cuda/delta/delta.h"

namespace quern::cuda::delta {

inline constexpr int kSplitBlocks = 4;  // of a cluster that shares a value head

/// As delta_decode, and with the same bits. split: a cluster a value head (sm_90 on). Throws Error(device).
void decode_rows(Context& context, const DeltaStep& step, bool split);

}  // namespace quern::cuda::delta
