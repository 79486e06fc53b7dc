// Rows to codes: a warp has a row, lane l its elements 8l .. 8l+7; lanes from d / 8 on have zeros and `active` false.
#pragma once

#include "ggml-like/cuda/attention/packed.cuh"

namespace quern::cuda::attention::packed {

/// The bits of the largest magnitude, which are in the order of the magnitudes; of a NaN beyond all others.
__device__ __forceinline__ uint32_t largest_of(const float (&x)[8]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    return most;
}
__device__ __forceinline__ uint32_t over_warp(uint32_t most) { return __reduce_max_sync(0xffffffffu, most); }
__device__ __forceinline__ float two_to(int k) {
    return __uint_as_float(static_cast<uint32_t>(k + 127) << 23);
}

/// kv::scale_exponent; `largest` = mantissa * 2^exponent, 1 <= mantissa < 2.
__device__ __forceinline__ float power_scale(uint32_t amax, float mantissa, int exponent) {
    if (amax == 0) return 1;
    const bool more = (amax & 0x7fffffu) > (__float_as_uint(mantissa) & 0x7fffffu);
    return two_to(min(max(static_cast<int>(amax >> 23) - 127 - exponent + more, kv::kLeastExponent),
                      kv::kMostExponent));
}
__device__ __forceinline__ float row_scale(uint32_t amax, float given, float mantissa, int exponent) {
    if (given > 0) return fminf(__bfloat162float(__float2bfloat16(given)), two_to(kv::kMostExponent));
    return power_scale(amax, mantissa, exponent);
}
/// x / s, where s is a power of two unless `given`.
__device__ __forceinline__ float over_scale(float x, float s, float given) {
    return given > 0 ? __fdiv_rn(x, s) : x * __uint_as_float((254u << 23) - __float_as_uint(s));
}

/// To nearest, ties to even, saturating; two codes.
__device__ __forceinline__ uint32_t to_e4m3(float x, float y) {
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(x), "f"(y));
    return codes;
#else
    const auto one = [](float v) {
        const uint32_t sign = __float_as_uint(v) >> 24 & 0x80u;
        const float a = fabsf(v);
        if (a >= 448.0f) return sign | 0x7eu;
        if (a < 0.015625f) return sign | static_cast<uint32_t>(__float2int_rn(a * 512.0f));
        uint32_t bits = __float_as_uint(a);
        bits += 0x7ffffu + (bits >> 20 & 1u);
        return sign | min((bits >> 20) - (120u << 3), 0x7eu);
    };
    return one(x) | one(y) << 8;
#endif
}

/// The code of x whose magnitude is the number of borders 0 .. 6 below |x|: `beyond(a, i)` says whether |x| lies beyond border i,
/// which is the first, the second or the fourth, for each code the same.
template <class Border, class Beyond>
__device__ __forceinline__ uint32_t code_of(float x, const Border& border, const Beyond& beyond) {
    const float a = fabsf(x);
    const bool four = beyond(a, border(3), true), two = beyond(a, four ? border(5) : border(1), true);
    const float last = four ? (two ? border(6) : border(4)) : (two ? border(2) : border(0));
    return (four ? 4u : 0u) + (two ? 2u : 0u) + (beyond(a, last, false) ? 1u : 0u) +
           (__float_as_uint(x) >> 28 & 8u);
}
/// x / step to nearest, ties to even, saturating. Without a division, but the same: borders between codes have three bits and steps
/// at most twelve, so that their products are exact, and no quotient is rounded to a border that x does not lie on.
__device__ __forceinline__ uint32_t to_e2m1(float x, float step) {
    return code_of(
        x,
        [&](int i) {
            constexpr float kBorders[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
            return kBorders[i] * step;
        },
        [](float a, float border, bool even) { return even ? a >= border : a > border; });
}
/// |x / step| without its fraction, at most 7, and the sign; step BF16, not negative. Likewise.
__device__ __forceinline__ uint32_t to_steps(float x, float step) {
    return code_of(
        x, [&](int i) { return static_cast<float>(i + 1) * step; },
        [](float a, float border, bool) { return a >= border; });
}
__device__ __forceinline__ uint32_t to_centroid(float x) {
    return code_of(
        x,
        [](int i) {
            constexpr float c[8] = {0.12890625f, 0.388671875f, 0.65625f, 0.94140625f,
                                    1.2578125f,  1.6171875f,   2.0625f,  2.734375f};
            return (c[i] + c[i + 1]) / 2;
        },
        [](float a, float border, bool) { return a > border; });
}

/// Bytes of a lane's codes.
__device__ __forceinline__ int lane_bytes(Packing packing) { return packing == Packing::fp8 ? 8 : 4; }

/// Where a lane puts its part of row `place` of a block.
struct RowAt {
    char* codes;            // of the lane
    char *blocks, *scales;  // of the row

    /// `at`: where in the row's codes those of the lane are, in the cache lane * lane_bytes.
    __device__ __forceinline__ RowAt(const Block& b, char* block, int place, int at)
        : codes(block + place * b.codes + at),
          blocks(block + b.blocks_at + place * b.blocks),
          scales(block + b.scales_at + place * b.scales) {}
    __device__ __forceinline__ void put_scale(int i, float s) const {
        reinterpret_cast<uint16_t*>(scales)[i] = bf16_bits(s);
    }
};

template <class F>
__device__ __forceinline__ uint32_t eight_codes(const float (&x)[8], const F& code) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= code(x[i]) << 4 * i;
    return codes;
}

// `most`: the row's largest magnitude, as largest_of() has it.

__device__ __forceinline__ void pack_fp8(const float (&x)[8], uint32_t most, float given, int lane,
                                         bool active, const RowAt& row) {
    const float s = row_scale(most, given, 1.75f, 8);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = over_scale(x[i], s, given);
    if (active)
        *reinterpret_cast<uint2*>(row.codes) = {to_e4m3(y[0], y[1]) | to_e4m3(y[2], y[3]) << 16,
                                                to_e4m3(y[4], y[5]) | to_e4m3(y[6], y[7]) << 16};
    if (lane == 0) row.put_scale(0, s);
}

__device__ __forceinline__ void pack_nvfp4(const float (&x)[8], uint32_t most, float given, int lane,
                                           bool active, const RowAt& row) {
    const uint32_t own = largest_of(x);
    const float largest = __uint_as_float(max(own, __shfl_xor_sync(0xffffffffu, own, 1)));
    const float s = row_scale(most, given, 1.3125f, 11);
    // a sixth, rounded once: the quotient by a product, and what it lacks
    constexpr float kSixth = 1.0f / 6;
    const float near = __fmul_rn(largest, kSixth), sixth = fmaf(fmaf(near, -6.0f, largest), kSixth, near);
    const uint32_t block = to_e4m3(over_scale(sixth, s, given), 0) & 0xffu;
    const float step = __uint_as_float(block << 20) * 0x1p120f * s;
    const uint32_t codes = block == 0 ? 0u : eight_codes(x, [&](float v) { return to_e2m1(v, step); });
    if (active) *reinterpret_cast<uint32_t*>(row.codes) = codes;
    if (active && lane % 2 == 0) row.blocks[lane / 2] = static_cast<char>(block);
    if (lane == 0) row.put_scale(0, s);
}

/// x has been multiplied by the Hadamard matrix.
__device__ __forceinline__ void pack_centroids(const float (&x)[8], uint32_t most, int d, int lane,
                                               bool active, const RowAt& row) {
    const float amax = __uint_as_float(most), over = amax > 0 ? __fdiv_rn(1.0f, amax) : 0.0f;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += (x[i] * over) * (x[i] * over);
    const float length = sqrtf(warp_sum(squares));
    const float to_unit = length > 0 ? sqrtf(static_cast<float>(d)) / length : 0.0f;
    const uint32_t codes = eight_codes(x, [&](float v) { return to_centroid(v * over * to_unit); });
    float of_centroids = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Looked centroids(lloyd(), codes >> 16 * half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 c = unpack_bf16(i == 0 ? centroids.first() : centroids.second());
            of_centroids += c.x * c.x, of_centroids += c.y * c.y;
        }
    }
    const float sum = warp_sum(active ? of_centroids : 0.0f);
    if (active) *reinterpret_cast<uint32_t*>(row.codes) = codes;
    if (lane == 0) row.put_scale(0, over > 0 ? amax * (length * rsqrtf(sum)) : 0.0f);
}

__device__ __forceinline__ void pack_steps(const float (&x)[8], int lane, bool active, const RowAt& row) {
    float most = active ? x[0] : -INFINITY, least = active ? x[0] : INFINITY;
#pragma unroll
    for (int i = 1; i < 8; ++i)
        if (active) most = fmaxf(most, x[i]), least = fminf(least, x[i]);
    most = warp_max(most), least = -warp_max(-least);
    const float s = __bfloat162float(__float2bfloat16(most / 15.0f - least / 15.0f)),
                m = __bfloat162float(__float2bfloat16(most / 2.0f + least / 2.0f));
    const uint32_t codes = s > 0 ? eight_codes(x, [&](float v) { return to_steps(v - m, s); }) : 0u;
    if (active) *reinterpret_cast<uint32_t*>(row.codes) = codes;
    if (lane == 0) row.put_scale(0, s), row.put_scale(1, m);
}

/// x <- H x over d elements, d a power of two of at least 8.
__device__ __forceinline__ void hadamard(float (&x)[8], int d, int lane) {
#pragma unroll
    for (int half = 1; half < 8; half *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if ((i & half) == 0) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b, x[i + half] = a - b;
            }
#pragma unroll 1
    for (int half = 1; half < d / 8; half *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], half);
            x[i] = lane & half ? other - x[i] : x[i] + other;
        }
    const float scale = rsqrtf(static_cast<float>(d));
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale;
}

/// One row by all lanes of a warp. One that is not finite becomes NaN, whatever its codes are.
__device__ __forceinline__ void pack_row(Packing packing, const float (&x)[8], int d, float given, int lane,
                                         const RowAt& row) {
    const bool active = lane * 8 < d;
    const uint32_t most = over_warp(largest_of(x));
    if (packing == Packing::fp8)
        pack_fp8(x, most, given, lane, active, row);
    else if (packing == Packing::nvfp4)
        pack_nvfp4(x, most, given, lane, active, row);
    else if (packing == Packing::centroids)
        pack_centroids(x, most, d, lane, active, row);
    else
        pack_steps(x, lane, active, row);
    if (most >= 0x7f800000u && lane == 0) row.put_scale(0, NAN);
}

}  // namespace quern::cuda::attention::packed
