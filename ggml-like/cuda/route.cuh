// The choice of experts from logits, and the grouping of pairs by expert. Used by one block at the end of the
// few-row router and by kernels of their own for many rows.
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

__device__ __forceinline__ float from_ordered_bits(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// One warp: the `used` best of `experts` logits of a row, falling, and their weights, renormalised; and the
/// sigmoid of the logit after the last expert's.
template <int kEach>
__device__ __forceinline__ void choose_experts(const float* logits, int experts, int used, int* ids,
                                               float* weights, float* shared) {
    const int lane = threadIdx.x % 32;
    uint32_t key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int e = lane + 32 * i;
        key[i] = e < experts ? ordered_bits(__ldcg(logits + e)) : 0;
    }
    const float gate = __ldcg(logits + experts);
    uint32_t own = 0;  // the lane's best, and where
    int at = 0;
    const auto find_own = [&] {
        own = key[0], at = 0;
#pragma unroll
        for (int i = 1; i < kEach; ++i)
            if (key[i] > own) own = key[i], at = i;
    };
    find_own();
    int mine = 0;
    uint32_t mine_key = 0;
#pragma unroll 1
    for (int j = 0; j < used; ++j) {
        const uint32_t best = __reduce_max_sync(0xffffffffu, own);
        const unsigned id = __reduce_min_sync(0xffffffffu, own == best ? lane + 32 * at : 0xffffu);
        if (j == lane) mine = static_cast<int>(id), mine_key = best;
        if (id % 32 == lane) {
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (i == at) key[i] = 0;
            find_own();
        }
    }
    const float logit = from_ordered_bits(mine_key);
    const float highest = __shfl_sync(0xffffffffu, logit, 0);
    const float e = lane < used ? __expf(logit - highest) : 0.0f;
    const float sum = warp_sum(e);
    if (lane < used) {
        ids[lane] = min(mine, experts - 1);
        weights[lane] = e / sum;
    }
    if (lane == 0) *shared = 1.0f / (1.0f + __expf(-gate));
}

}  // namespace quern::cuda
