// Norm and rotation of one head by one warp, for ops whose heads are rotated whole (ops/rotary.h).
#pragma once

#include "ggml-like/cuda/attention/attention.cuh"

namespace quern::cuda::attention {

/// By which cos and sin: `turns` as in AttentionCall, of frequencies that need not be powers of one number.
struct HeadTurns {
    uint64_t turns[kMaxHeadDim / 2];
    float scale;
};

/// to[i] = rotated(from / rms(from) * norm), d a multiple of 2 up to 256; `from` and `to` may be the same.
__device__ __forceinline__ void rotate_head(const HeadTurns& by, int position, int d, float eps,
                                            const float* norm, const bf16* from, bf16* to, int lane) {
    constexpr int kPairs = kMaxHeadDim / 64;
    const int half = d / 2;
    float a[kPairs], b[kPairs], sum = 0;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        a[j] = i < half ? __bfloat162float(from[i]) : 0;
        b[j] = i < half ? __bfloat162float(from[i + half]) : 0;
        sum += a[j] * a[j] + b[j] * b[j];
    }
    const float r = rsqrtf(warp_sum(sum) / static_cast<float>(d) + eps);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
        const int i = lane + 32 * j;
        if (i >= half) break;
        const float2 turned = rotation(by.turns[i], position);
        const float x = a[j] * r * norm[i], y = b[j] * r * norm[i + half];
        to[i] = __float2bfloat16((x * turned.x - y * turned.y) * by.scale);
        to[i + half] = __float2bfloat16((y * turned.x + x * turned.y) * by.scale);
    }
}

/// Fills `by` from frequencies in radians a position.
void set_head_turns(HeadTurns& by, const double* frequency, int pairs, double scale);

}  // namespace quern::cuda::attention
