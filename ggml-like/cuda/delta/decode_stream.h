// The kernel of decode_stream.cu.
#pragma once

#include "ggml-like/cuda/delta/delta.h"

namespace quern::cuda::delta {

/// Of an SM.
inline constexpr int kStreamBlocks = 4;
/// Whether so many fit.
bool decode_stream_fits(const Context& context);
/// As delta_decode, for steps none of whose rows goes to the journal: the same bits.
void decode_stream(Context& context, const DeltaStep& step);

}  // namespace quern::cuda::delta
