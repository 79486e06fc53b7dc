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

__device__ __forceinline__ float from_ordered_bits(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// A logit and its place i in the lane: expert lane + 32 i.
struct Ranked {
    uint32_t key;
    int place;
};

/// A lane's logits, best first; of equal ones the lower place (Batcher's odd-even merge sort: P, K are its steps).
template <int P = 1, int K = P, int N>
__device__ __forceinline__ void sort_falling(Ranked (&list)[N]) {
#pragma unroll
    for (int a = K % P; a < N - K; ++a) {
        if ((a - K % P) / K % 2 != 0 || a / (2 * P) != (a + K) / (2 * P)) continue;
        const Ranked x = list[a], y = list[a + K];
        const bool swap = y.key > x.key || (y.key == x.key && y.place < x.place);
        list[a] = swap ? y : x;
        list[a + K] = swap ? x : y;
    }
    if constexpr (K > 1)
        sort_falling<P, K / 2>(list);
    else if constexpr (2 * P < N)
        sort_falling<2 * P, 2 * P>(list);
}

/// One warp: the `used` best of `experts` logits of a row, falling, and their weights, renormalised; and the sigmoid of
/// the logit after the last expert's.
template <int kEach>
__device__ __forceinline__ void choose_experts(const float* logits, int experts, int used, int* ids, float* weights,
                                               float* shared) {
    const int lane = threadIdx.x % 32;
    Ranked list[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int e = lane + 32 * i;
        list[i] = {e < experts ? ordered_bits(__ldcg(logits + e)) : 0, i};
    }
    const float gate = __ldcg(logits + experts);
    sort_falling(list);
    int mine = 0;
    uint32_t mine_key = 0;
#pragma unroll 1
    for (int j = 0; j < used; ++j) {
        const uint32_t best = __reduce_max_sync(0xffffffffu, list[0].key);
        const unsigned who = __ballot_sync(0xffffffffu, list[0].key == best);
        const unsigned own = lane + 32 * list[0].place;
        const unsigned id = who & (who - 1) ? __reduce_min_sync(0xffffffffu, list[0].key == best ? own : 0xffffu)
                                            : __shfl_sync(0xffffffffu, own, __ffs(who) - 1);
        if (j == lane) mine = static_cast<int>(id), mine_key = best;
        const bool taken = own == id;
#pragma unroll
        for (int i = 0; i + 1 < kEach; ++i)
            if (taken) list[i] = list[i + 1];
        if (taken) list[kEach - 1].key = 0;
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
