// Attention among patches by products of warpgroups (grid_warpgroups.cu).
#pragma once

#include <cuda_bf16.h>

#include "ggml-like/cuda/attention/grid_shapes.h"
#include "ggml-like/cuda/context.h"

namespace quern::cuda::attention {

struct GridCall {
    const __nv_bfloat16* qkv;
    const int4* place;
    const int* start;
    int frames, rows, heads;
    int query, queries;   // the rows that are asked: y has these alone
    float theta, scale;   // scale: of scores, with log2(e)
    __nv_bfloat16* work;  // rotated keys, then values: [2][head][piece][row][8]
    __nv_bfloat16* y;
};

/// On Hopper, heads of kGridWidth.
void grid_attention_warpgroups(const GridCall& call, Context& context);

}  // namespace quern::cuda::attention
