// The loops of Encoders, compiled once per instruction set: plain C++ that compilers turn into vectors. Include it in no other
// file, and call nothing here that another header defines, nvfp4.h neither: a linker could take its wider version for all files.
#pragma once

#include <cstdint>
#include <cstring>

#include "ggml-like/cpu/encode.h"
#include "ggml-like/nvfp4.h"

namespace quern::cpu {
namespace {

using nvfp4::kBlock;

constexpr int kChunk = 32, kLanes = 8;  // blocks done stage by stage, and together
// E4M3 has eight scales per doubling: these reach from one half to 1.6 times the starting scale.
constexpr int kBelow = 8, kAbove = 6;
constexpr int32_t kMagnitudeBits = 0x7fffffff, kInfinityBits = 0x7f800000;
constexpr int kLastScale = 0x7e;        // 448
constexpr float kLeastScale = 0x1p-9f;  // the smallest E4M3 above zero

// kLanes values, on every processor; operators and ?: are those of each lane.
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline Ints bits_of(Floats x) { return reinterpret_cast<Ints>(x); }
inline Floats float_of(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
inline Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
inline float to_float(int32_t x) { return static_cast<float>(x); }
inline Floats to_float(Ints x) { return __builtin_convertvector(x, Floats); }

/// A magnitude as the nearest E2M1 code, ties to the even one: nvfp4::float_to_e2m1 without branches. Codes are
/// half a power of two apart: adding 1.5 * 2^23 such steps leaves their number in the last digits. Positive floats are
/// ordered as integers are.
template <typename F, typename I>
struct Rounded {
    F value;
    I code;
};
template <typename F, typename I = decltype(bits_of(F()))>
inline Rounded<F, I> round_magnitude(F a) {
    constexpr int32_t kSix = 0x40c00000, kOne = 0x3f800000;
    const I bits = smaller(bits_of(a), I() + kSix);
    const I power = larger(bits & kInfinityBits, I() + kOne);
    const F magic = 12582912.0f * (float_of(power) * 0.5f);
    const F sum = float_of(bits) + magic;
    return {sum - magic, (bits_of(sum) & 7) + ((power - kOne) >> 22)};
}

/// nvfp4::float_to_e4m3 without branches.
inline int32_t e4m3_of(float x) {
    constexpr float kHalfSteps = 24576.0f;  // 1.5 * 2^14: a step of its last bit is 2^-9, that of subnormals
    constexpr int32_t kSmallestNormal = 0x3c800000, kLargest = 0x43e00000;  // 2^-6, 448
    const int32_t bits = bits_of(x), magnitude = bits & kMagnitudeBits;
    const int32_t subnormal = bits_of(float_of(magnitude) + kHalfSteps) - bits_of(kHalfSteps);
    const int32_t most = smaller(magnitude, kLargest);
    const int32_t rounded = most + 0x7ffff + (most >> 20 & 1);  // to 3 mantissa bits, ties to even
    const int32_t normal = (rounded >> 20) - (120 << 3);
    const int32_t code = (magnitude < kSmallestNormal ? subnormal : normal) | (bits >> 24 & 0x80);
    return magnitude > kInfinityBits ? 0x7f : code;
}

/// nvfp4::e4m3_to_float of scales from 0 to 0x7e, without branches; some number of others.
template <typename I, typename F = decltype(float_of(I()))>
inline F scale_value(I scale) {
    const F subnormal = to_float(scale) * kLeastScale;
    const F normal = float_of((scale << 20) + (120 << 23));
    return scale < 8 ? subnormal : normal;
}

/// What a code is multiplied by: block scale and global scale, rounded once.
template <typename I, typename F = decltype(float_of(I()))>
inline F step_of(I scale, GlobalScale global) {
    return global.divisor ? scale_value(scale) / global.stored : scale_value(scale) * global.stored;
}

inline int32_t largest_bits(const float* values, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = bits_of(values[i]) & kMagnitudeBits;
        largest = larger(largest, bits);
    }
    return largest;
}

/// The scales that make the largest values of a chunk's blocks code 6.
inline void amax_scales(const float* amax, GlobalScale global, int32_t* scales) {
    constexpr int32_t kEighth = 0x20;  // of zeros
    if (global.divisor) {
        for (int b = 0; b < kChunk; ++b) {
            const int32_t scale = e4m3_of(global.stored * (amax[b] / nvfp4::kMaxCode));
            scales[b] = scale == 0 ? kEighth : scale;
        }
        return;
    }
    const float six = nvfp4::kMaxCode * global.stored;
    for (int b = 0; b < kChunk; ++b) {
        const float scale = amax[b] / six;
        const float least = scale > kLeastScale ? scale : kLeastScale;
        scales[b] = e4m3_of(scale == 0 ? 1.0f : least);
    }
}

/// The search for the best scales of kLanes blocks at a time.
class ScaleSearch {
  public:
    /// Blocks from `count` on are none; amax and scales: kLanes of them. The search starts at these scales, and leaves
    /// the best there.
    static void run(const float* values, const float* amax, int count, GlobalScale global, int32_t* scales) {
        ScaleSearch search(values, amax, count, global, scales);
        search.find();
        memcpy(scales, &search.best_, sizeof search.best_);
    }

  private:
    ScaleSearch(const float* values, const float* amax, int count, GlobalScale global, const int32_t* scales)
        : global_(global) {
        memcpy(&amax_, amax, sizeof amax_);
        memcpy(&start_, scales, sizeof start_);
        for (int lane = 0; lane < kLanes && lane < count; ++lane)
            for (int i = 0; i < kBlock; ++i) magnitudes_[i][lane] = values[lane * kBlock + i];
        for (Floats& m : magnitudes_) m = float_of(bits_of(m) & kMagnitudeBits);
    }

    void find() {
        best_ = start_;
        least_ = error(step_of(start_, global_));
        for (int by = 1; by <= kAbove; ++by) try_scales(start_ + by);
        for (int by = 1; by <= kBelow && try_scales(start_ - by);) ++by;
    }
    /// Whether any error could be the least one. That of the largest value alone is too large for all smaller scales if it
    /// is for one.
    bool try_scales(Ints scales) {
        const Floats steps = step_of(scales, global_);
        const Floats cut = amax_ - nvfp4::kMaxCode * steps;
        const Ints possible = (scales >= 1) & (scales <= kLastScale) & ((cut <= 0) | (cut * cut < least_));
        if (!any(possible)) return false;
        const Floats errors = error(steps);
        const Ints better = possible & (errors < least_);
        least_ = better ? errors : least_;
        best_ = better ? scales : best_;
        return true;
    }
    static bool any(Ints lanes) {
        int64_t halves[sizeof lanes / sizeof(int64_t)], any = 0;
        memcpy(halves, &lanes, sizeof lanes);
        for (const int64_t half : halves) any |= half;
        return any != 0;
    }
    /// The sums of the squares of all 16 errors: halves are added to one another.
    Floats error(Floats steps) const {
        Floats squares[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const Floats difference = round_magnitude(magnitudes_[i] / steps).value * steps - magnitudes_[i];
            squares[i] = difference * difference;
        }
        for (int width = kBlock / 2; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) squares[i] += squares[i + width];
        return squares[0];
    }

    const GlobalScale global_;
    Floats amax_, magnitudes_[kBlock] = {}, least_;
    Ints start_, best_;
};

/// codes: two a byte.
inline void encode_codes(const float* values, const float* steps, int blocks, uint8_t* codes) {
    float ratio[kChunk * kBlock];
    uint8_t single[kChunk * kBlock];
    for (int b = 0; b < blocks; ++b)
        for (int i = b * kBlock; i < (b + 1) * kBlock; ++i)
            ratio[i] = float_of(bits_of(values[i]) & kMagnitudeBits) / steps[b];
    for (int i = 0; i < blocks * kBlock; ++i)
        single[i] = static_cast<uint8_t>(round_magnitude(ratio[i]).code | (values[i] < 0 ? 8 : 0));
    for (int i = 0; i < blocks * kBlock / 2; ++i)
        codes[i] = static_cast<uint8_t>(single[2 * i] | single[2 * i + 1] << 4);
}

inline void encode_chunk(const float* values, int blocks, GlobalScale global, bool search, uint8_t* codes,
                         uint8_t* scales) {
    float amax[kChunk] = {}, steps[kChunk];
    int32_t scale[kChunk];
    for (int b = 0; b < blocks; ++b) amax[b] = float_of(largest_bits(values + b * kBlock, kBlock));
    amax_scales(amax, global, scale);
    for (int b = 0; search && b < blocks; b += kLanes)
        ScaleSearch::run(values + b * kBlock, amax + b, blocks - b, global, scale + b);
    for (int b = 0; b < kChunk; ++b) steps[b] = step_of(scale[b], global);
    for (int b = 0; b < blocks; ++b) scales[b] = static_cast<uint8_t>(scale[b]);
    encode_codes(values, steps, blocks, codes);
}

void encode_nvfp4(const float* values, int64_t blocks, GlobalScale global, bool search, uint8_t* codes,
                  uint8_t* scales) {
    for (int64_t b = 0; b < blocks; b += kChunk) {
        const int count = static_cast<int>(blocks - b < kChunk ? blocks - b : kChunk);
        encode_chunk(values + b * kBlock, count, global, search, codes + b * (kBlock / 2), scales + b);
    }
}

void encode_fp8(const float* values, int64_t n, float scale, uint8_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(e4m3_of(values[i] / scale));
}

constexpr Encoders encoders_named(const char* name) { return {name, largest_bits, encode_nvfp4, encode_fp8}; }

}  // namespace
}  // namespace quern::cpu
