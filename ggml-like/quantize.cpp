#include "ggml-like/quantize.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"

namespace quern {
namespace {

using nvfp4::kBlock;

constexpr float kRange = nvfp4::kMaxCode * nvfp4::kMaxScale;  // 2688
// E4M3 has eight scales per doubling: these reach from one half to 1.6 times the starting scale.
constexpr int kBelow = 8, kAbove = 6;

/// A magnitude as the nearest E2M1 code, ties to the even one: nvfp4::float_to_e2m1 without branches, so that
/// loops over it are vectorized. Codes are half a power of two apart: adding 1.5 * 2^23 such steps leaves
/// their number in the last digits. Positive floats are ordered as integers are.
struct Rounded {
    float value;
    int32_t code;
};
inline Rounded round_magnitude(float a) {
    constexpr auto kSix = std::bit_cast<int32_t>(nvfp4::kMaxCode), kOne = std::bit_cast<int32_t>(1.0f);
    int32_t bits = std::bit_cast<int32_t>(a);
    bits = bits < kSix ? bits : kSix;
    int32_t power = bits & 0x7f800000;
    power = power > kOne ? power : kOne;
    const float magic = 12582912.0f * (std::bit_cast<float>(power) * 0.5f);
    const float sum = std::bit_cast<float>(bits) + magic;
    return {sum - magic, (std::bit_cast<int32_t>(sum) & 7) + ((power - kOne) >> 22)};
}

float block_error(const float* magnitudes, float step) {
    float squares[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        const float difference = round_magnitude(magnitudes[i] / step).value * step - magnitudes[i];
        squares[i] = difference * difference;
    }
    for (int width = kBlock / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) squares[i] += squares[i + width];
    return squares[0];
}

uint8_t amax_scale(float amax, const Nvfp4Global& global) {
    if (global.form == GlobalForm::divisor) {
        const uint8_t scale = nvfp4::float_to_e4m3(global.stored * (amax / nvfp4::kMaxCode));
        return scale == 0 ? nvfp4::float_to_e4m3(0.125f) : scale;
    }
    const float scale = amax / (nvfp4::kMaxCode * global.stored);
    return nvfp4::float_to_e4m3(scale == 0 ? 1.0f : std::max(scale, 0.001953125f));
}

uint8_t best_scale(const float* magnitudes, float amax, uint8_t start, const Nvfp4Global& global) {
    uint8_t best = start;
    float least = block_error(magnitudes, global.step(start));
    const auto try_scale = [&](int candidate) {
        const float step = global.step(static_cast<uint8_t>(candidate));
        const float cut = amax - nvfp4::kMaxCode * step;
        if (cut > 0 && cut * cut >= least) return false;  // the error of the largest value alone is too large
        const float error = block_error(magnitudes, step);
        if (error < least) {
            least = error;
            best = static_cast<uint8_t>(candidate);
        }
        return true;
    };
    const int last = nvfp4::float_to_e4m3(nvfp4::kMaxScale);
    for (int candidate = start + 1; candidate <= std::min(start + kAbove, last); ++candidate)
        try_scale(candidate);
    for (int candidate = start - 1; candidate >= std::max(start - kBelow, 1) && try_scale(candidate);)
        --candidate;
    return best;
}

void encode_block(const float* values, const Nvfp4Global& global, ScaleChoice choice, uint8_t* codes,
                  uint8_t* scale) {
    float magnitudes[kBlock];
    float amax = 0;
    for (int i = 0; i < kBlock; ++i) {
        magnitudes[i] = std::fabs(values[i]);
        amax = magnitudes[i] > amax ? magnitudes[i] : amax;
    }
    *scale = amax_scale(amax, global);
    if (choice == ScaleChoice::mse && amax > 0) *scale = best_scale(magnitudes, amax, *scale, global);
    const float step = global.step(*scale);
    int32_t code[kBlock];
    for (int i = 0; i < kBlock; ++i)
        code[i] = round_magnitude(magnitudes[i] / step).code | (values[i] < 0) << 3;
    for (int i = 0; i < kBlock; i += 2) codes[i / 2] = static_cast<uint8_t>(code[i] | code[i + 1] << 4);
}

/// nvfp4::float_to_e4m3 without branches, so that a loop of it is compiled to vectors.
uint8_t e4m3_of(float x) {
    constexpr float kHalfSteps = 24576.0f;  // 1.5 * 2^14: a step of its last bit is 2^-9, that of subnormals
    constexpr auto kSmallestNormal = std::bit_cast<int32_t>(0x1p-6f),
                   kLargest = std::bit_cast<int32_t>(448.0f),
                   kInfinity = std::bit_cast<int32_t>(std::numeric_limits<float>::infinity());
    const auto bits = std::bit_cast<int32_t>(x), magnitude = bits & std::numeric_limits<int32_t>::max();
    const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + kHalfSteps) -
                              std::bit_cast<int32_t>(kHalfSteps);
    const int32_t most = std::min(magnitude, kLargest);
    const int32_t rounded = most + 0x7ffff + (most >> 20 & 1);  // to 3 mantissa bits, ties to even
    const int32_t normal = (rounded >> 20) - (120 << 3);
    const int32_t code = (magnitude < kSmallestNormal ? subnormal : normal) | (bits >> 24 & 0x80);
    return static_cast<uint8_t>(magnitude > kInfinity ? 0x7f : code);
}

}  // namespace

float largest_magnitude(std::span<const float> values) {
    int32_t largest = 0;  // the bits of magnitudes have their order, and those of NaN are above all
    for (const float v : values)
        largest = std::max(largest, std::bit_cast<int32_t>(v) & std::numeric_limits<int32_t>::max());
    const auto magnitude = std::bit_cast<float>(largest);
    return std::isnan(magnitude) ? NAN : magnitude;
}

Nvfp4Global Nvfp4Global::of(float amax, GlobalForm form) {
    CHECK(std::isfinite(amax) && amax >= 0, "[Nvfp4Global] largest magnitude {}", amax);
    const float stored = form == GlobalForm::divisor ? kRange / amax : amax / kRange;
    return {std::isnormal(stored) ? stored : 1.0f, form};
}

float Nvfp4Global::step(uint8_t block_scale) const {
    const float scale = nvfp4::e4m3_to_float(block_scale);
    return form == GlobalForm::divisor ? scale / stored : scale * stored;
}

void encode_nvfp4(std::span<const float> values, const Nvfp4Global& global, ScaleChoice choice,
                  uint8_t* codes, uint8_t* scales) {
    CHECK(values.size() % kBlock == 0, "[encode_nvfp4] {} values are no whole blocks of 16", values.size());
    for (size_t b = 0; b < values.size() / kBlock; ++b)
        encode_block(values.data() + b * kBlock, global, choice, codes + b * (kBlock / 2), scales + b);
}

float fp8_scale(float amax) {
    CHECK(std::isfinite(amax) && amax >= 0, "[fp8_scale] largest magnitude {}", amax);
    const float scale = amax / nvfp4::kMaxScale;
    return std::isnormal(scale) ? scale : 1.0f;
}

void encode_fp8(std::span<const float> values, float scale, uint8_t* out) {
    for (size_t i = 0; i < values.size(); ++i) out[i] = e4m3_of(values[i] / scale);
}

}  // namespace quern
