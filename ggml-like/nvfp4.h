// NVFP4: the one definition of the format, for host and device.
//
// A matrix [N, K] is stored as 4-bit codes (E2M1), two a byte: byte j of a row holds element 2j in its low
// and 2j+1 in its high nibble. Every 16 consecutive K elements share one E4M3 scale; the whole matrix shares
// one FP32 global scale. Value = e2m1(code) * e4m3(block_scale) * global_scale (multiplier form, as
// ModelOpt's weight_scale_2; compressed-tensors stores the reciprocal). The product of the first two is exact
// in BF16. Sources: OCP Microscaling formats (E2M1, E4M3); NVIDIA ModelOpt and vLLM compressed-tensors
// layouts.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define QUERN_HD __host__ __device__
#else
#define QUERN_HD
#endif

namespace quern::nvfp4 {

inline constexpr int kBlock = 16;           // elements per block scale
inline constexpr float kMaxCode = 6.0f;     // largest E2M1 magnitude
inline constexpr float kMaxScale = 448.0f;  // largest E4M3 value
inline constexpr uint8_t kScaleNan = 0x7f;  // NaN, with or without the sign bit

QUERN_HD inline float from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/// E2M1 code (low 4 bits) to float: 0 .5 1 1.5 2 3 4 6, bit 3 is the sign. Exact.
QUERN_HD inline float e2m1_to_float(uint8_t code) {
    const uint32_t magnitude = code & 7u;
    const uint32_t sign = static_cast<uint32_t>(code & 8u) << 28;
    const uint32_t bits = magnitude == 0   ? 0u
                          : magnitude == 1 ? 0x3f000000u
                                           : 0x3f000000u + (magnitude << 22);
    return from_bits(sign | bits);
}

/// E4M3 (finite, no infinities; 0x7f and 0xff are NaN) to float. Exact.
QUERN_HD inline float e4m3_to_float(uint8_t v) {
    const uint32_t sign = static_cast<uint32_t>(v & 0x80u) << 24;
    const uint32_t exponent = (v >> 3) & 15u;
    const uint32_t mantissa = v & 7u;
    if ((v & 0x7fu) == 0x7fu) return from_bits(sign | 0x7fc00000u);
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0.001953125f;  // m * 2^-9
        return sign ? -magnitude : magnitude;
    }
    return from_bits(sign | ((exponent + 120u) << 23) | (mantissa << 20));
}

/// The 16 values of a code as a table, for host code.
inline constexpr float kCodeValue[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/// float to E2M1: saturating at 6, round to nearest, ties to the even code. NaN is not a legal input.
inline uint8_t float_to_e2m1(float x) {
    const float a = x < 0 ? -x : x;
    uint8_t code;
    if (a <= 0.25f)
        code = 0;
    else if (a < 0.75f)
        code = 1;
    else if (a <= 1.25f)
        code = 2;
    else if (a < 1.75f)
        code = 3;
    else if (a <= 2.5f)
        code = 4;
    else if (a < 3.5f)
        code = 5;
    else if (a <= 5.0f)
        code = 6;
    else
        code = 7;
    return static_cast<uint8_t>(code | (x < 0 ? 8 : 0));
}

/// float to E4M3: round to nearest even, saturating at +-448. NaN gives 0x7f.
inline uint8_t float_to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
    const float a = x < 0 ? -x : x;
    if (a != a) return 0x7f;
    if (a >= 448.0f) return static_cast<uint8_t>(sign | 0x7e);
    if (a <
        0.015625f) {  // below 2^-6: subnormal, steps of 2^-9; adding 1.5 * 2^14 rounds to nearest even there
        const float shifted = a + 24576.0f;
        const int m = static_cast<int>((shifted - 24576.0f) * 512.0f);
        return static_cast<uint8_t>(sign | m);  // m = 8 is exactly the smallest normal
    }
    uint32_t magnitude;
    memcpy(&magnitude, &a, sizeof magnitude);
    magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);  // round to 3 mantissa bits, ties to even
    const uint32_t exponent = (magnitude >> 23) - 120u;
    const uint32_t v = (exponent << 3) | ((magnitude >> 20) & 7u);
    return static_cast<uint8_t>(sign | (v > 0x7e ? 0x7e : v));
}

}  // namespace quern::nvfp4
