// Matrix products of chosen experts with rows of prompts: linear/gemm.h's, grouped by expert.
#pragma once

#include "ggml-like/cuda/linear/gemm.h"

namespace quern::cuda::moe {

using namespace pack;
using namespace linear;

/// Grouped, paired order: for every pair p = t*used + j of expert e (groups: ops/moe_gate_up.h, in device
/// memory) routed[p, 0..F) = silu(gate_e h[t]) * (up_e h[t]), BF16 [tokens*used, F], h [tokens, cols].
void gemm_gate_up(Context& context, const PackedExperts& w, const void* h, const RowScale& scale,
                  const int* groups, int tokens, int used, void* routed);

/// Grouped: for every pair p of expert e: terms[(t*(used+1) + j), 0..rows) = down_e routed[p], BF16.
void gemm_down(Context& context, const PackedExperts& w, const void* routed, const int* groups, int tokens,
               int used, void* terms);

}  // namespace quern::cuda::moe
