// Rows to codes: a warp has a row, lane l its elements 8l .. 8l+7; lanes from d / 8 on have zeros and `active` false.
#pragma once

#include "ggml-like/cuda/attention/packed.cuh"

namespace quern::cuda::attention::packed {

__device__ __forceinline__ float largest_of(const float (&x)[8]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
    return most;
}
__device__ __forceinline__ float two_to(int k) {
    return __uint_as_float(static_cast<uint32_t>(k + 127) << 23);
}

/// kv::scale_exponent; `largest` = mantissa * 2^exponent, 0.5 <= mantissa < 1.
__device__ __forceinline__ float power_scale(float amax, float mantissa, int exponent) {
    if (amax == 0) return 1;
    int e;
    const float m = frexpf(amax, &e);
    return two_to(min(max(e - exponent + (m > mantissa), kv::kLeastExponent), kv::kMostExponent));
}
__device__ __forceinline__ float row_scale(float amax, float given, float mantissa, int exponent) {
    if (given > 0) return fminf(__bfloat162float(__float2bfloat16(given)), two_to(kv::kMostExponent));
    return power_scale(amax, mantissa, exponent);
}

/// To nearest, ties to even, saturating.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80u;
    const float a = fabsf(x);
    if (a >= 448.0f) return sign | 0x7eu;
    if (a < 0.015625f) return sign | static_cast<uint32_t>(__float2int_rn(a * 512.0f));
    uint32_t bits = __float_as_uint(a);
    bits += 0x7ffffu + (bits >> 20 & 1u);
    return sign | min((bits >> 20) - (120u << 3), 0x7eu);
}
/// x / step to nearest, ties to even, saturating. Without a division, but the same: borders between codes have three bits and steps
/// at most twelve, so that their products are exact, and no quotient is rounded to a border that x does not lie on.
__device__ __forceinline__ uint32_t to_e2m1(float x, float step) {
    const float a = fabsf(x);
    const uint32_t m = (a > 0.25f * step) + (a >= 0.75f * step) + (a > 1.25f * step) + (a >= 1.75f * step) +
                       (a > 2.5f * step) + (a >= 3.5f * step) + (a > 5.0f * step);
    return m | (x < 0 ? 8u : 0u);
}
/// |x / step| without its fraction, at most 7, and the sign; step BF16, not negative. Likewise.
__device__ __forceinline__ uint32_t to_steps(float x, float step) {
    if (step <= 0) return 0;
    const float a = fabsf(x);
    uint32_t m = 0;
#pragma unroll
    for (int i = 1; i < 8; ++i) m += a >= static_cast<float>(i) * step;
    return m | (x < 0 ? 8u : 0u);
}
__device__ __forceinline__ uint32_t to_centroid(float x, float& square) {
    constexpr float c[8] = {0.12890625f, 0.388671875f, 0.65625f, 0.94140625f,
                            1.2578125f,  1.6171875f,   2.0625f,  2.734375f};
    const float a = fabsf(x);
    uint32_t m = 0;
    float value = c[0];
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const bool more = a > (c[i] + c[i + 1]) / 2;
        m += more;
        value = more ? c[i + 1] : value;
    }
    square = value * value;
    return m | (x < 0 ? 8u : 0u);
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

__device__ __forceinline__ void pack_fp8(const float (&x)[8], float given, int lane, bool active,
                                         const RowAt& row) {
    const float s = row_scale(warp_max(largest_of(x)), given, 0.875f, 9);
    float y[8];
    if (given > 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = __fdiv_rn(x[i], s);
    } else {
        const float over = 1.0f / s;  // exact, of a power of two
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = x[i] * over;
    }
    uint32_t codes[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i / 4] |= to_e4m3(y[i]) << i % 4 * 8;
    if (active) *reinterpret_cast<uint2*>(row.codes) = {codes[0], codes[1]};
    if (lane == 0) row.put_scale(0, s);
}

__device__ __forceinline__ void pack_nvfp4(const float (&x)[8], float given, int lane, bool active,
                                           const RowAt& row) {
    const float own = largest_of(x), largest = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, 1));
    const float s = row_scale(warp_max(own), given, 0.65625f, 12);
    const uint32_t block = to_e4m3(__fdiv_rn(largest / 6.0f, s));
    const float step = __uint_as_float(block << 20) * 0x1p120f * s;
    const uint32_t codes = block == 0 ? 0u : eight_codes(x, [&](float v) { return to_e2m1(v, step); });
    if (active) *reinterpret_cast<uint32_t*>(row.codes) = codes;
    if (active && lane % 2 == 0) row.blocks[lane / 2] = static_cast<char>(block);
    if (lane == 0) row.put_scale(0, s);
}

/// x has been multiplied by the Hadamard matrix.
__device__ __forceinline__ void pack_centroids(const float (&x)[8], int d, int lane, bool active,
                                               const RowAt& row) {
    const float amax = warp_max(largest_of(x)), over = amax > 0 ? __fdiv_rn(1.0f, amax) : 0.0f;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += (x[i] * over) * (x[i] * over);
    const float length = sqrtf(warp_sum(squares));
    const float to_unit = length > 0 ? sqrtf(static_cast<float>(d)) / length : 0.0f;
    float of_centroids = 0;
    const uint32_t codes = eight_codes(x, [&](float v) {
        float square;
        const uint32_t code = to_centroid(v * over * to_unit, square);
        of_centroids += square;
        return code;
    });
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
    const uint32_t codes = eight_codes(x, [&](float v) { return to_steps(v - m, s); });
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

__device__ __forceinline__ bool not_finite(const float (&x)[8]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    return most >= 0x7f800000u;
}

/// One row by all lanes of a warp. One that is not finite becomes NaN, whatever its codes are.
__device__ __forceinline__ void pack_row(Packing packing, const float (&x)[8], int d, float given, int lane,
                                         const RowAt& row) {
    const bool active = lane * 8 < d;
    if (packing == Packing::fp8)
        pack_fp8(x, given, lane, active, row);
    else if (packing == Packing::nvfp4)
        pack_nvfp4(x, given, lane, active, row);
    else if (packing == Packing::centroids)
        pack_centroids(x, d, lane, active, row);
    else
        pack_steps(x, lane, active, row);
    if (__any_sync(0xffffffffu, not_finite(x)) && lane == 0) row.put_scale(0, NAN);
}

}  // namespace quern::cuda::attention::packed
