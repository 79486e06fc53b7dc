// The choice of experts from logits, and the grouping of pairs by expert. Used by one block at the end of the few-row
// router and by kernels of their own for many rows.
#pragma once

#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {

inline constexpr int kMostExperts = 512;
inline constexpr int kMostUsed = 32;

/// Larger is better, ties to the lower id; NaN loses.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// One warp: the `used` best of `experts` logits of a row, falling, and their weights, renormalised.
template <int kEach>
__device__ __forceinline__ void choose_experts(const float* logits, int experts, int used, int* ids, float* weights) {
    const int lane = threadIdx.x % 32;
    uint32_t key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int e = lane + 32 * i;
        key[i] = e < experts ? ordered_bits(__ldcg(logits + e)) : 0;
    }
    int mine = 0;
    for (int j = 0; j < used; ++j) {
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) best = max(best, key[i]);
        best = __reduce_max_sync(0xffffffffu, best);
        int id = experts;
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i)
            if (key[i] == best) id = lane + 32 * i;
        id = __reduce_min_sync(0xffffffffu, static_cast<unsigned>(id));
        if (j == lane) mine = id;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (id == lane + 32 * i) key[i] = 0;
    }
    mine = min(mine, experts - 1);
    const float logit = lane < used ? __ldcg(logits + mine) : 0.0f;
    const float highest = __shfl_sync(0xffffffffu, logit, 0);
    const float e = lane < used ? __expf(logit - highest) : 0.0f;
    const float sum = warp_sum(e);
    if (lane < used) {
        ids[lane] = mine;
        weights[lane] = e / sum;
    }
}

}  // namespace quern::cuda
