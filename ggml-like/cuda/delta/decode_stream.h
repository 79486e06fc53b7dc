// The kernel of decode_stream.cu.
#pragma once

#include "ggml-like/cuda/delta/delta.h"

namespace quern::cuda::delta {

/// Whether two blocks fit an SM.
bool decode_stream_fits(const Context& context);
/// As delta_decode, for steps none of whose rows goes to the journal: the same bits.
void decode_stream(Context& context, const DeltaStep& step);

}  // namespace quern::cuda::delta
