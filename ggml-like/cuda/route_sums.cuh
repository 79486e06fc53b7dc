// Sums of the router's logits that linear_add makes for the mixture of experts after it (route_work.cuh):
// 64-bit fixed point, so that blocks add in any order to the same bits. They lack the norm's factor
// (left_norm.h).
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {

inline constexpr float kSumsOne = 0x1p32f, kMostSum = 0x1p21f;  // of a logit; of 16 products

__device__ __forceinline__ void add_to_sum(int64_t* sum, float v) {
    const int64_t fixed = __float2ll_rn(fminf(fmaxf(v, -kMostSum), kMostSum) * kSumsOne);
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(sum), "l"(fixed) : "memory");
}
__device__ __forceinline__ float read_sum(const int64_t* sum) {
    return __ll2float_rn(__ldcg(reinterpret_cast<const long long*>(sum))) * (1 / kSumsOne);
}

}  // namespace quern::cuda
