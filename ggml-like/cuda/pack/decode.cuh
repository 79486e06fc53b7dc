// Packed codes to BF16 registers of the A operand (packed.h has the layout), without tables or conversion instructions:
// the bits of a code are moved to where BF16 has its sign, its low exponent bits and its high mantissa bits. Subnormal
// codes come out right, as subnormal BF16 numbers.
#pragma once

#include "ggml-like/cuda/pack/packed.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::pack {

using namespace ptx;

/// Activations that meet fp8 or nvfp4 codes in kernels of answers are multiplied by 2^60 first, so that products stay
/// far from FP32's subnormals. Sums are then too small by 2^60 (fp8) or 2^66 (nvfp4), which the rows' factors make up
/// for.
template <Kind K>
constexpr float kActivationLift = K == Kind::bf16 ? 1.0f : 0x1p60f;
template <Kind K>
constexpr float kSumLift = K == Kind::bf16  ? 1.0f
                           : K == Kind::fp8 ? 0x1p60f
                                            : 0x1p66f;

/// Words of rows g and g + 8 for a pair of nvfp4 blocks become a[0..3] of its even (0) or odd (1) block, values *
/// 2^-126. 9 instructions a word: three of its four code places are at most one shift from where BF16 has the bits; the
/// fourth takes one product with 2^11 + 2^5 + 1, which moves s, e, and e m there, and no carry reaches them.
__device__ __forceinline__ void decode_nvfp4(uint32_t low, uint32_t high, int odd, uint32_t (&a)[4]) {
    const auto field = [](uint32_t w) { return w & 0x81c081c0u; };
    const auto split_field = [&](uint32_t w) { return field(((w >> 7) & 0x00d800d8u) * 0x821u); };
    a[0] = odd ? field(low << 3) : field(low);
    a[1] = odd ? field(high << 3) : field(high);
    a[2] = odd ? field(low << 6) : split_field(low);
    a[3] = odd ? field(high << 6) : split_field(high);
}

/// Two words of fp8 codes become a[0..3], values * 2^-120.
__device__ __forceinline__ void decode_fp8(uint32_t w0, uint32_t w1, uint32_t (&a)[4]) {
    const uint32_t w[2] = {w0, w1};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        const uint32_t low = w[p] << 8;
        a[p] = (low & 0x80008000u) | ((low >> 4) & 0x07f007f0u);
        a[p + 2] = (w[p] & 0x80008000u) | ((w[p] >> 4) & 0x07f007f0u);
    }
}

/// sum += scale times products of a lane whose rows are g (x) and g + 8 (y): the scales of an FP8 chunk.
template <int kN>
__device__ __forceinline__ void add_scaled(float (&sum)[kN][4], const float (&products)[kN][4],
                                           const float2& scale) {
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            sum[j][r] = __fmaf_rn(r < 2 ? scale.x : scale.y, products[j][r], sum[j][r]);
}

/// Four E4M3 bytes to floats, exact. No scale is NaN (checked at load).
__device__ __forceinline__ void decode_scales(uint32_t bytes, float (&s)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t v = (bytes >> (8 * i)) & 0xffu;
        s[i] = __uint_as_float((v & 0x7fu) << 20) * 0x1p120f;
    }
}

}  // namespace quern::cuda::pack
