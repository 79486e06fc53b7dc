// Device functions that all attention kernels use: rotation, softmax weights, output gate.
#pragma once

#include "ggml-like/cuda/attention/attention.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::attention {

using namespace ptx;

/// cos and sin of position * theta^(-2i/R), where turns = call.turns[i]. Whole turns leave the 64-bit product at the
/// top; its upper half is the phase in turns * 2^32.
__device__ __forceinline__ float2 rotation(uint64_t turns, int position) {
    const auto phase = static_cast<int>((static_cast<uint64_t>(position) * turns) >> 32);
    float s, k;
    __sincosf(static_cast<float>(phase) * 1.4629180792671596e-9f, &s, &k);  // 2 pi / 2^32
    return {k, s};
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

__device__ __forceinline__ float2 unpack_bf16(uint32_t v) {
    return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
}

/// 2^x in one instruction; 0 for -infinity and where the result would be subnormal.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// Scores are kept times log2(e), so that exp is exp2.
__device__ __forceinline__ float score_scale(int head_dim) {
    return 1.4426950408889634f * rsqrtf(static_cast<float>(head_dim));
}

/// 2^(maximum - highest), the factor of a partial result in a merged one; 0 for one without keys.
__device__ __forceinline__ float part_weight(float maximum, float highest) {
    return maximum == -INFINITY ? 0.0f : fast_exp2(maximum - highest);
}

/// Merges two partial results of a pair of output elements, each over some of the keys: {value, value, maximum of the
/// scores, sum of the exponentials}, values not yet divided by the sum. Written with fmaf and __fmul_rn, so that it
/// gives the same bits wherever it is inlined.
__device__ __forceinline__ float4 merge(float4 a, float4 b) {
    const float highest = fmaxf(a.z, b.z), wa = part_weight(a.z, highest), wb = part_weight(b.z, highest);
    return {fmaf(b.x, wb, __fmul_rn(a.x, wa)), fmaf(b.y, wb, __fmul_rn(a.y, wa)), highest,
            fmaf(b.w, wb, __fmul_rn(a.w, wa))};
}

/// Two elements of y: values over the sum, times the gate's sigmoid, rounded to BF16.
__device__ __forceinline__ uint32_t gated_pair(float4 part, uint32_t gate) {
    const float2 g = unpack_bf16(gate);
    const float r = __frcp_rn(part.w);
    return pack_bf16(__fmul_rn(__fmul_rn(part.x, r), sigmoid(g.x)),
                     __fmul_rn(__fmul_rn(part.y, r), sigmoid(g.y)));
}

}  // namespace quern::cuda::attention
