// Attention of prompt rows: scores, softmax and values of 32 keys, by one warp for its 16 rows of M. The softmax and its
// rows also serve products of warpgroups (prefill_warpgroups.cuh), whose scores are of 64 keys.
//
// Lane l has rows l / 4 and l / 4 + 8: of the scores s[n] keys 8n + 2(l%4) + {0, 1}, of the output o[n] the same
// elements.
#pragma once

#include "ggml-like/cuda/attention/prefill_tiles.cuh"

namespace quern::cuda::attention::prefill {

using namespace ptx;

using Scores = float[kKeys / 8][4];
using Output = float[kDim / 8][4];

/// s = q k^T, not scaled yet.
__device__ __forceinline__ void score(uint32_t k_tile, const uint32_t (&q)[kSteps][4], int lane, Scores& s) {
    const uint32_t base =
        k_tile + (lane % 8 + lane / 16 * 8) * kDim * 2 + (((lane / 8 & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32_t k[4];
            load_matrices(k, (base ^ ((2 * i & 7) << 4)) + (i >> 2) * 128 + n * 16 * kDim * 2);
            mma(s[2 * n], q[i], k[0], k[1]);
            mma(s[2 * n + 1], q[i], k[2], k[3]);
        }
}

__device__ __forceinline__ float over_row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// Running softmax of the lane's two rows over a segment. `sum` is of the lane's own keys until add_lanes.
struct Softmax {
    float maximum[2], sum[2];
};

__device__ __forceinline__ void add_lanes(Softmax& state) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        state.sum[h] += __shfl_xor_sync(0xffffffffu, state.sum[h], 1);
        state.sum[h] += __shfl_xor_sync(0xffffffffu, state.sum[h], 2);
    }
}

__device__ __forceinline__ void clear(Softmax& state, Output& o) {
#pragma unroll
    for (int h = 0; h < 2; ++h) state.maximum[h] = kNoScore, state.sum[h] = 0;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] = 0;
}

/// The factors of the lane's two rows of output when maxima have moved.
struct Rescale {
    float by[2] = {1, 1};
    bool needed = false;  // by any of the warp's rows
};

/// A step's softmax in two parts; in between or afterwards the output is rescaled. First the maxima: they may lag behind the
/// highest score by kSlack, so that this is rarely needed. Each row decides for itself; once one of the warp's rows needs
/// it, all are multiplied, the others by 1.
template <int kGroups>
__device__ __forceinline__ Rescale move_maxima(const float (&s)[kGroups][4], float scale, Softmax& state) {
    Rescale rescale;
    float highest[2];
    bool exceeded = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < kGroups; ++n) x = fmaxf(x, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        highest[h] = over_row_max(x) * scale;
        exceeded |= highest[h] > state.maximum[h] + kSlack;
    }
    rescale.needed = __any_sync(0xffffffffu, exceeded);
    if (rescale.needed) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float now = highest[h] > state.maximum[h] + kSlack ? highest[h] : state.maximum[h];
            rescale.by[h] = fast_exp2(state.maximum[h] - now);
            state.maximum[h] = now;
            state.sum[h] *= rescale.by[h];
        }
    }
    return rescale;
}

/// Then scores become probabilities.
template <int kGroups>
__device__ __forceinline__ void weigh(float (&s)[kGroups][4], float scale, Softmax& state) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[n][e] = fast_exp2(fmaf(s[n][e], scale, -state.maximum[e / 2]));
            state.sum[e / 2] += s[n][e];
        }
}

__device__ __forceinline__ void apply(const Rescale& rescale, Output& o) {
    if (!rescale.needed) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] *= rescale.by[e / 2];
}

/// o += p v.
__device__ __forceinline__ void add_values(uint32_t v_tile, const Scores& p, int lane, Output& o) {
    const uint32_t base = v_tile + lane % 16 * kDim * 2 + ((lane / 16 ^ (lane & 7)) << 4);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
        const uint32_t a[4] = {pack_bf16(p[2 * k][0], p[2 * k][1]), pack_bf16(p[2 * k][2], p[2 * k][3]),
                               pack_bf16(p[2 * k + 1][0], p[2 * k + 1][1]),
                               pack_bf16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int j = 0; j < kDim / 16; ++j) {
            uint32_t v[4];
            load_matrices_transposed(v, (base ^ ((2 * j & 7) << 4)) + (j >> 2) * 128 + k * 16 * kDim * 2);
            mma(o[2 * j], a, v[0], v[1]);
            mma(o[2 * j + 1], a, v[2], v[3]);
        }
    }
}

/// Hides keys past each row's own; the lane's first score is of key `key`.
template <int kGroups>
__device__ __forceinline__ void mask(float (&s)[kGroups][4], int key, int last0, int last1) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (key + 8 * n + e % 2 > (e < 2 ? last0 : last1)) s[n][e] = -INFINITY;
}

}  // namespace quern::cuda::attention::prefill
