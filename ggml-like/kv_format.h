// KV formats: how a cache of keys or of values keeps its rows of d elements, one for each token and KV head.
//
// A cache is a tensor [pages, G, 64, d] whose dtype names the format. A page of one head is a block of 64 rows, in up to
// three arrays that follow each other: codes [64][..], scales of 16 elements [64][d/16] E4M3, scales of a row [64][1 or 2]
// BF16. Nothing else lies between blocks.
//
//   format        dtype          bytes of a row, d = 256   an element
//   f32 f16 bf16  F32 F16 BF16   1024, 512, 512            itself
//   fp8           F8_E4M3        256 + 2                   e4m3(code) * s
//   nvfp4         NVFP4          128 + 16 + 2              e2m1(code) * e4m3(scale of 16) * s
//   tq4, keys     U8             128 + 2                   kCentroids[code] * s, of H k
//   tq4, values   U8             128 + 4                   kSteps[code] * s + m
//
// Codes of 4 bits have the sign in bit 3 and the index of a magnitude in bits 0 to 2; element 2j is in the low half of byte
// j. s and m are of the row.
//
//   fp8, nvfp4   s is the power of two of at most 2^7 that lets the largest magnitude fit, so that multiplying by it rounds
//                nothing; or what the checkpoint says (k_scale, v_scale), rounded to BF16. The rest is as in nvfp4.h and
//                quantize.h: to nearest, ties to even, saturating; beyond 57,344 (fp8) values saturate.
//   tq4, keys    TurboQuant's (vLLM's turboquant_4bit_nc): H is the Hadamard matrix over sqrt(d), which spreads outliers, and
//                queries are multiplied by it, too. Codes are of the nearest centroid (Lloyd and Max's for a normal
//                distribution) of the elements over their root mean square; s = |k| / |centroids|, so that the length is
//                kept. It differs from vLLM's bytes by what s has divided already, and by BF16 for FP16 there.
//   tq4, values  16 equal steps from the least to the largest value: m is the middle, s a step, codes at m +- s/2, 3s/2 ...
//
// A row with an infinity or a NaN has NaN for s: all of it is NaN, and so is what attends to it, as with F32 and BF16.
//
// Rows are packed from FP32. Readers compute an element in FP32, or round it once to BF16. Source: OCP E4M3 and E2M1; Zandieh
// et al., TurboQuant (2025); vLLM's presets turboquant_4bit_nc and turboquant_k8v4, whose "k8v4" is keys in fp8, values in tq4.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml-like/tensor.h"

namespace quern::kv {

inline constexpr int kPageRows = 64;  // kPageTokens of ops/batch.h
inline constexpr int kBlock = 16;     // elements of an E4M3 scale
inline constexpr DType kTq4 = DType::U8;

/// How a row is packed. plain: its elements in the tensor's dtype.
enum class Packing : uint8_t { plain, fp8, nvfp4, centroids, steps };

constexpr Packing packing_of(DType dtype, bool values) {
    if (dtype == DType::F8_E4M3) return Packing::fp8;
    if (dtype == DType::NVFP4) return Packing::nvfp4;
    if (dtype == kTq4) return values ? Packing::steps : Packing::centroids;
    return Packing::plain;
}

/// Bytes of one row in each array of a block, and where the arrays begin.
struct Layout {
    int codes = 0, blocks = 0, scales = 0;

    constexpr int row() const { return codes + blocks + scales; }
    constexpr int64_t head() const { return int64_t{kPageRows} * row(); }  // of 64 rows of a head
    constexpr int blocks_at() const { return kPageRows * codes; }
    constexpr int scales_at() const { return kPageRows * (codes + blocks); }
};

constexpr Layout layout_of(Packing packing, DType dtype, int head_dim) {
    switch (packing) {
        case Packing::fp8:
            return {head_dim, 0, 2};
        case Packing::nvfp4:
            return {head_dim / 2, head_dim / kBlock, 2};
        case Packing::centroids:
            return {head_dim / 2, 0, 2};
        case Packing::steps:
            return {head_dim / 2, 0, 4};
        case Packing::plain:
            break;
    }
    return {head_dim * (dtype == DType::F32 ? 4 : 2), 0, 0};
}
constexpr Layout layout_of(DType dtype, bool values, int head_dim) {
    return layout_of(packing_of(dtype, values), dtype, head_dim);
}

/// Bytes of a page of one layer's keys or values.
constexpr int64_t page_bytes(DType dtype, bool values, int64_t kv_heads, int head_dim) {
    return kv_heads * layout_of(dtype, values, head_dim).head();
}

/// Whether rows of this size can be packed so: nvfp4 multiples of 16, keys of tq4 powers of two, values multiples of 2.
bool fits(Packing packing, int head_dim);

/// Magnitudes of 4-bit codes, exact in BF16. Centroids: in units of the standard deviation.
inline constexpr float kCentroids[8] = {0.12890625f, 0.388671875f, 0.65625f, 0.94140625f,
                                        1.2578125f,  1.6171875f,   2.0625f,  2.734375f};
inline constexpr float kSteps[8] = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f};
inline constexpr float kFloats[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};  // E2M1

inline constexpr int kLeastExponent = -100, kMostExponent = 7;  // of a row's s that is a power of two
/// The least k in that range with amax <= largest * 2^k; amax finite, not negative. `largest` is 448 or 2688.
int scale_exponent(float amax, float largest);

/// x <- H x, H the Sylvester-Hadamard matrix over sqrt(count); count is a power of two. Its own inverse.
void hadamard(float* x, int64_t count);

/// Packs row `place` of a block. Keys of tq4 must have been multiplied by H. `scale`: what the checkpoint says for fp8 and
/// nvfp4; 0: from the values.
void pack_row(Packing packing, const float* x, int head_dim, float scale, std::byte* block, int place);
void unpack_row(Packing packing, const std::byte* block, int place, int head_dim, float* out);

}  // namespace quern::kv
