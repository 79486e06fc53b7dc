// Shapes of the products of chosen experts with rows of prompts (gemm_experts.cu). Plain C++.
#pragma once

#include "ggml-like/cuda/linear/gemm_shapes.h"
#include "ggml-like/cuda/linear/warpgroup_shapes.h"

namespace quern::cuda::moe {

using namespace pack;
using namespace linear;

using Few = GemmShape<8, 32, 2, 1, 4, false>;
using Many = GemmShape<8, 128, 2, 1, 2, true>;

/// On sm_90a: 128 rows, as many blocks an SM as hide each other's first copies.
template <Kind K>
using Handful = WarpgroupShape<16, K == Kind::nvfp4 ? 4 : 1, 3, 1, 1, true>;
template <Kind K>
using Tall = WarpgroupShape<96, K == Kind::nvfp4 ? 2 : 1, 2, 1, 1, true>;

}  // namespace quern::cuda::moe
