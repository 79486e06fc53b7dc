// Norm and rotation of a head by a warp, a lane eight elements: what is done to q and k before they are stored.
#pragma once

#include "ggml-like/cuda/attention/attention.cuh"

namespace quern::cuda::attention {

using namespace ptx;

__device__ __forceinline__ void unpack8(const uint4& raw, float (&x)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(words[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
    }
}
__device__ __forceinline__ void load8(const bf16* from, float (&x)[8]) {
    unpack8(*reinterpret_cast<const uint4*>(from), x);
}

/// By what pair i of row t rotates (ops/gated_attention.h).
__device__ __forceinline__ int rope_position(const AttentionCall& c, int i, int t, int position) {
    if (c.rope == nullptr) return position;
    const int axis = i % 3 == 1 && i < 3 * c.row_pairs ? 1 : i % 3 == 2 && i < 3 * c.column_pairs ? 2 : 0;
    return c.rope[axis * c.rope_row + t];
}

/// What a lane of `prepare` knows of its elements 8l .. 8l + 7 of every head, l < d / 8: weights of the norms, and by which
/// cos and sin they rotate; the sin is negative for the first of a pair.
struct Elements {
    float q_norm[8], k_norm[8], cos[8], sin[8];
    int pair[8];  // the other one of the pair

    __device__ __forceinline__ Elements(const AttentionCall& c, int first, int t, int position) {
        const int half = c.rotary_dims / 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int e = first + i;
            q_norm[i] = e < c.head_dim ? c.q_norm[e] : 0;
            k_norm[i] = e < c.head_dim ? c.k_norm[e] : 0;
            const int of = e < half ? e : e - half;
            const float2 turned =
                e < 2 * half ? rotation(c.turns[of], rope_position(c, of, t, position)) : float2{1, 0};
            cos[i] = turned.x, sin[i] = e < half ? -turned.y : turned.y;
            pair[i] = e < half ? e + half : e < 2 * half ? e - half : e;
        }
    }
    /// Norm and rotation of one head by one warp. `shared`: [R] and up to 7 more, of this warp.
    __device__ __forceinline__ void norm_rope(const AttentionCall& c, const uint4& raw, bool is_q, int lane,
                                              float* shared, float (&x)[8]) const {
        float sum = 0;
        unpack8(raw, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
        const float r = rsqrtf(warp_sum(sum) / static_cast<float>(c.head_dim) + c.eps);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= r * (is_q ? q_norm[i] : k_norm[i]);
        const bool rotates = lane * 8 < c.rotary_dims;
        if (rotates) {
            auto* own = reinterpret_cast<float4*>(shared + lane * 8);
            own[0] = {x[0], x[1], x[2], x[3]}, own[1] = {x[4], x[5], x[6], x[7]};
        }
        __syncwarp();
        if (rotates)
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = x[i] * cos[i] + shared[pair[i]] * sin[i];
        __syncwarp();  // before the next head overwrites `shared`
    }
};

/// Eight elements to BF16.
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

}  // namespace quern::cuda::attention
