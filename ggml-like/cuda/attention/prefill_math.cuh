// Attention of prompt rows: scores, softmax and values of 32 keys, by one warp for its 16 rows of M.
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

/// Scores become probabilities. The maximum may lag behind the highest score by kSlack, so that the output is rarely
/// rescaled. Each row decides for itself; once one of the warp's rows needs it, all are multiplied, the others by 1.
__device__ __forceinline__ void softmax(Scores& s, float scale, Softmax& state, Output& o) {
    float highest[2];
    bool exceeded = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) x = fmaxf(x, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        highest[h] = over_row_max(x) * scale;
        exceeded |= highest[h] > state.maximum[h] + kSlack;
    }
    if (__any_sync(0xffffffffu, exceeded)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float now = highest[h] > state.maximum[h] + kSlack ? highest[h] : state.maximum[h];
            const float f = fast_exp2(state.maximum[h] - now);
            state.maximum[h] = now;
            state.sum[h] *= f;
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) o[n][2 * h] *= f, o[n][2 * h + 1] *= f;
        }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[n][e] = fast_exp2(fmaf(s[n][e], scale, -state.maximum[e / 2]));
            state.sum[e / 2] += s[n][e];
        }
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
__device__ __forceinline__ void mask(Scores& s, int key, int last0, int last1) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (key + 8 * n + e % 2 > (e < 2 ? last0 : last1)) s[n][e] = -INFINITY;
}

}  // namespace quern::cuda::attention::prefill
