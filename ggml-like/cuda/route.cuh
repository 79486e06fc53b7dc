// The choice of experts from logits, and the grouping of pairs by expert. Used by one block at the end of the
// few-row router, by every block of gate and up for one row, and by kernels of their own for many rows.
#pragma once

#include <climits>

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {

inline constexpr int kMostExperts = 512;

/// Larger is better, ties to the lower id; NaN loses.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_bits(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// A lane's keys: of experts lane, lane + 32, ...
template <int kEach>
__device__ __forceinline__ void load_keys(uint32_t (&key)[kEach], const float* logits, int experts) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int e = static_cast<int>(threadIdx.x % 32) + 32 * i;
        key[i] = e < experts ? ordered_bits(__ldcg(logits + e)) : 0;
    }
}

/// Pairs of Batcher's odd-even merge sort that are K apart, while runs of P are merged; then the rest of it.
template <int kEach, int P = 1, int K = P>
__device__ __forceinline__ void sort_falling(uint32_t (&key)[kEach], int (&id)[kEach]) {
#pragma unroll
    for (int i = 0; i + K < kEach; ++i)
        if (i >= K % P && (i - K % P) % (2 * K) < K && i / (2 * P) == (i + K) / (2 * P)) {
            const bool swap = key[i + K] > key[i];
            const uint32_t low = min(key[i], key[i + K]);
            const int other = swap ? id[i] : id[i + K];
            key[i] = max(key[i], key[i + K]), key[i + K] = low;
            id[i] = swap ? id[i + K] : id[i], id[i + K] = other;
        }
    if constexpr (K > 1)
        sort_falling<kEach, P, K / 2>(key, id);
    else if constexpr (2 * P < kEach)
        sort_falling<kEach, 2 * P>(key, id);
}

/// One warp: the `used` best of a row's logits, falling, ties to the lower id, into ids; of lane j the
/// ordered bits of number j.
template <int kEach>
__device__ __forceinline__ uint32_t choose_slowly(const float* logits, int experts, int used, int* ids) {
    const int lane = threadIdx.x % 32;
    uint32_t key[kEach], mine = 0;
    load_keys(key, logits, experts);
    __syncwarp();
#pragma unroll 1
    for (int j = 0; j < used; ++j) {
        uint32_t own = key[0];
        int at = 0;
#pragma unroll
        for (int i = 1; i < kEach; ++i)
            if (key[i] > own) own = key[i], at = i;
        const uint32_t best = __reduce_max_sync(0xffffffffu, own);
        const int id =
            static_cast<int>(__reduce_min_sync(0xffffffffu, own == best ? lane + 32 * at : 0xffffu));
        if (j == lane) mine = best, ids[j] = min(id, experts - 1);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (lane + 32 * i == id) key[i] = 0;
    }
    return mine;
}

/// As choose_slowly, but false and no result if two of the best are equal: each lane sorts what it has, and a
/// round is one maximum over the lanes' first.
template <int kEach>
__device__ __forceinline__ bool choose_sorted(const float* logits, int experts, int used, int* ids,
                                              uint32_t& mine) {
    static_assert(kEach == 8, "places of a lane are 4 bits of 32");
    const int lane = threadIdx.x % 32;
    uint32_t key[kEach];
    int place[kEach];
    load_keys(key, logits, experts);
#pragma unroll
    for (int i = 0; i < kEach; ++i) place[i] = i;
    sort_falling(key, place);
    uint32_t places = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) places |= place[i] << 4 * i;
    unsigned equal = 0;
#pragma unroll 1
    for (int j = 0; j < used; ++j) {
        const uint32_t best = __reduce_max_sync(0xffffffffu, key[0]);
        const bool wins = key[0] == best;
        const unsigned winners = __ballot_sync(0xffffffffu, wins);
        equal |= (winners & (winners - 1)) | (wins && key[1] == best);
        if (wins) ids[j] = lane + 32 * (places & 15);
        if (j == lane) mine = best;
        places = wins ? places >> 4 : places;
#pragma unroll
        for (int i = 0; i + 1 < kEach; ++i) key[i] = wins ? key[i + 1] : key[i];
        key[kEach - 1] = wins ? 0 : key[kEach - 1];
    }
    return !__any_sync(0xffffffffu, equal != 0);
}

/// Lane j's weight, of its choice's ordered bits: softmax over the `used` chosen.
__device__ __forceinline__ float weight_of(uint32_t mine, int used) {
    const float logit = from_ordered_bits(mine);
    const float highest = __shfl_sync(0xffffffffu, logit, 0);
    const float e = static_cast<int>(threadIdx.x % 32) < used ? __expf(logit - highest) : 0.0f;
    return e / warp_sum(e);
}
__device__ __forceinline__ float gate_of(float logit) { return 1.0f / (1.0f + __expf(-logit)); }

/// One warp: the `used` best of `experts` logits of a row, falling, and their weights, renormalised; and the
/// gate of the logit after the last expert's. `ids` is seen by the whole warp.
template <int kEach>
__device__ __forceinline__ void choose_experts(const float* logits, int experts, int used, int* ids,
                                               float* weights, float* shared) {
    const int lane = threadIdx.x % 32;
    const float gate = __ldcg(logits + experts);
    const float weight = weight_of(choose_slowly<kEach>(logits, experts, used, ids), used);
    if (lane < used) weights[lane] = weight;
    if (lane == 0) *shared = gate_of(gate);
    __syncwarp();
}

inline constexpr int kNoExpert = INT_MAX;

/// Groups (ops/moe_route.h) from ids, by all threads of one block, a thread an expert and a thread a pair:
/// counting beats sorting where pairs are few. Behind the ids comes kNoExpert, up to a multiple of four.
__device__ __forceinline__ void group_few(const int* ids, int pairs, int experts, int* groups) {
    const int tid = threadIdx.x;
    const int own = tid < pairs ? ids[tid] : -1;
    int before = 0, place = 0;
    const auto count = [&](int id, int j) {
        before += id < tid;
        place += id < own + (j < tid);
    };
#pragma unroll 1
    for (int j = 0; j < pairs; j += 4) {
        const int4 four = *reinterpret_cast<const int4*>(ids + j);
        count(four.x, j), count(four.y, j + 1), count(four.z, j + 2), count(four.w, j + 3);
    }
    if (tid <= experts) groups[tid] = before;
    if (tid == 0) groups[experts] = pairs;
    if (tid < pairs) groups[experts + 1 + place] = tid;
}

// ---- what one row chose, for kernels that cannot wait for the end of the one that chooses ----

/// An expert and its weight, written and read at once as 8 bytes; zeros: not chosen yet.
struct Chosen {
    int id;
    float weight;
};

__device__ __forceinline__ void publish(uint64_t* to, const Chosen& c) {
    const uint64_t bits = static_cast<uint64_t>(c.id + 1) << 32 | __float_as_uint(c.weight);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
/// Waits until it has been published.
__device__ __forceinline__ Chosen published(const uint64_t* from) {
    uint64_t bits;
    do {
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
    } while (bits == 0);
    return {static_cast<int>(bits >> 32) - 1, __uint_as_float(static_cast<uint32_t>(bits))};
}

}  // namespace quern::cuda
