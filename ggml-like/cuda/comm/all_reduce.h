// The sum over ranks (ops/all_reduce_add.h) as a kernel of each rank's own.
#pragma once

#include "ggml-like/cuda/context.h"

namespace quern::cuda::comm {

/// Queues sum[i] = part[i] of all ranks, in their order, FP32. `count` is a multiple of 4; both are aligned to 16 bytes. The
/// context belongs to a rank (Context::peers). Where a message does not come in time, `sum` is anything and Watch::lost says so.
void all_reduce(Context& context, const float* part, float* sum, int64_t count);

}  // namespace quern::cuda::comm
