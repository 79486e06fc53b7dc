// silu(gate) * up.
#pragma once

#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {

/// Answers: rounded to BF16.
__device__ __forceinline__ bf16 gated(float gate, float up) {
    return __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
}
/// Prompts.
__device__ __forceinline__ float gated_prompt(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

}  // namespace quern::cuda
