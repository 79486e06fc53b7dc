// The router's logits of many answer rows (route_work.cuh).
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::moe {

using namespace pack;

/// sums I64 [rows, pitch] = h BF16 [rows, columns] times the router, in fixed point; every logit is written. Throws
/// Error(device) unless the router is BF16.
void route_logits(Context& context, const Packed& router, const void* h, int rows, int64_t* sums, int pitch);

}  // namespace quern::cuda::moe
