// silu(gate) * up.
#pragma once

#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::linear {

using namespace ptx;

/// Answers: rounded to BF16.
__device__ __forceinline__ bf16 gated(float gate, float up) {
    return __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
}
/// Prompts.
__device__ __forceinline__ float gated_prompt(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

}  // namespace quern::cuda::linear
