// Packed caches (kv_format.h) on the device: codes to BF16, eight elements at a time, or to F16. pack_rows.cuh has the way back.
//
//   a page of a head   codes [64][..] | scales of 16 [64][d/16] | scales of a row [64][1 or 2]
//
// BF16. E4M3: the exponent's and the mantissa's bits are those of a BF16 that is 2^120 times smaller; a product with the row's
// scale times 2^120 makes up for it. E2M1: likewise, 2^126 times. Equal steps: 128 + n in BF16 has n in its last bits.
//
// F16. E4M3: the conversion of sm_89. E2M1: its bits where E4M3 has them are the value over 2^6. Equal steps: the number of steps
// from the least one is a subnormal F16, its value times 2^24.
//
// Centroids, and all codes of 4 bits where speed does not matter: byte permutations look up both bytes in tables of eight.
#pragma once

#include "ggml-like/cuda/attention/attention.cuh"
#include "ggml-like/kv_format.h"

#include <cuda_fp16.h>

#include <bit>

namespace quern::cuda::attention::packed {

using namespace ptx;
using kv::Packing;

/// Where the arrays of a block lie; bytes of a row in each of them.
struct Block {
    int codes, blocks_at, blocks, scales_at, scales, bytes;

    __device__ __forceinline__ explicit Block(const kv::Layout& l, int rows = kKeysPerPage)
        : codes(l.codes),
          blocks_at(rows * l.codes),
          blocks(l.blocks),
          scales_at(rows * (l.codes + l.blocks)),
          scales(l.scales),
          bytes(rows * (l.codes + l.blocks + l.scales)) {}
};

__device__ __forceinline__ __nv_bfloat162 as_pair(uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ uint32_t as_bits(__nv_bfloat162 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    return as_bits(__hmul2(as_pair(a), as_pair(b)));
}
__device__ __forceinline__ uint32_t times_plus(uint32_t a, uint32_t b, uint32_t c) {
    return as_bits(__hfma2(as_pair(a), as_pair(b), as_pair(c)));
}
/// A BF16 twice.
__device__ __forceinline__ uint32_t both(uint16_t x) { return uint32_t{x} * 0x10001u; }

constexpr uint32_t kTwoTo120 = 0x7b807b80u;  // twice, in BF16

/// Of four E4M3 codes the first and the third: their values over 2^120.
__device__ __forceinline__ uint32_t low_e4m3(uint32_t codes) {
    return ((codes << 8) & 0x80008000u) | ((codes << 4) & 0x07f007f0u);
}

/// Two E4M3 scales, in bytes 1 and 3, times 2^118: with E2M1 over 2^126, values over 2^8.
__device__ __forceinline__ uint32_t lifted_scales(uint32_t scales) {
    return times(times((scales >> 4) & 0x07f007f0u, kTwoTo120), 0x7a807a80u);
}
/// kSteps of the last three bits n of each half: 128 + n is what a BF16 of 128 has with n in its last bits.
__device__ __forceinline__ uint32_t step_magnitudes(uint32_t x) {
    constexpr uint32_t kOne = 0x3f803f80u, kMinus = 0xc2ffc2ffu;  // 1, -127.5
    return times_plus((x & 0x00070007u) | 0x43004300u, kOne, kMinus);
}
/// Magnitudes of the eight codes in BF16, or in F16, low and high bytes.
struct Table {
    uint32_t low[2], high[2];
};
__device__ __forceinline__ Table e2m1() { return {{0xc0800000u, 0xc0804000u}, {0x3f3f3f00u, 0x40404040u}}; }
__device__ __forceinline__ Table lloyd() { return {{0x7128c704u, 0x2f04cfa1u}, {0x3f3f3e3eu, 0x40403f3fu}}; }
__device__ __forceinline__ Table uniform() {
    return {{0x6020c000u, 0xf0d0b090u}, {0x40403f3fu, 0x40404040u}};
}

/// A positive, normal FP32 that F16 can hold.
constexpr uint32_t half_bits(float x) { return (std::bit_cast<uint32_t>(x) >> 13) - (112u << 10); }
/// Byte `byte` of the F16 of centroids 4 * part .. + 3.
constexpr uint32_t bytes_of_centroids(int part, int byte) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i)
        bytes |= (half_bits(kv::kCentroids[4 * part + i]) >> 8 * byte & 0xffu) << 8 * i;
    return bytes;
}
inline constexpr uint32_t kLloydLow0 = bytes_of_centroids(0, 0), kLloydLow1 = bytes_of_centroids(1, 0),
                          kLloydHigh0 = bytes_of_centroids(0, 1), kLloydHigh1 = bytes_of_centroids(1, 1);
/// kCentroids in F16.
__device__ __forceinline__ Table lloyd_half() {
    return {{kLloydLow0, kLloydLow1}, {kLloydHigh0, kLloydHigh1}};
}

__device__ __forceinline__ Table table_of(Packing packing) {
    if (packing == Packing::nvfp4) return e2m1();
    return packing == Packing::centroids ? lloyd() : uniform();
}

/// Low and high bytes of the BF16 of the four codes in the lower half of `codes`.
struct Looked {
    uint32_t low, high;

    __device__ __forceinline__ Looked(const Table& t, uint32_t codes) {
        const uint32_t magnitudes = codes & 0x7777u;
        low = __byte_perm(t.low[0], t.low[1], magnitudes);
        high = __byte_perm(t.high[0], t.high[1], magnitudes);
        // A selector's bit 3 asks for eight copies of a byte's upper bit: of 0x80 that is 0xff.
        uint32_t signs;
        asm("prmt.b32 %0, %1, %1, %2;" : "=r"(signs) : "r"(0x80808080u), "r"(codes));
        high |= (signs << 1) & 0x80808080u;
    }
    /// As pairs: codes 0 and 1, 2 and 3.
    __device__ __forceinline__ uint32_t first() const { return __byte_perm(low, high, 0x5140); }
    __device__ __forceinline__ uint32_t second() const { return __byte_perm(low, high, 0x7362); }
};

__device__ __forceinline__ __half2 as_halves(uint32_t bits) {
    return *reinterpret_cast<const __half2*>(&bits);
}
__device__ __forceinline__ uint32_t as_bits(__half2 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t times_half(uint32_t a, uint32_t b) {
    return as_bits(__hmul2(as_halves(a), as_halves(b)));
}
/// The lower or the upper half, twice.
__device__ __forceinline__ uint32_t half_twice(uint32_t pair, int upper) {
    return as_bits(upper == 0 ? __low2half2(as_halves(pair)) : __high2half2(as_halves(pair)));
}

/// Of four E4M3 codes the first two and the last two in F16.
__device__ __forceinline__ void halves_of(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
#else
    constexpr uint32_t kTwoTo8 = 0x5c005c00u;
    const auto value = [](uint32_t x) {  // codes in bytes 1 and 3
        return times_half((x & 0x80008000u) | ((x >> 1) & 0x3f803f80u), kTwoTo8);
    };
    low = value(__byte_perm(codes, 0, 0x1404)), high = value(__byte_perm(codes, 0, 0x3424));
#endif
}
/// Two columns of codes, of two rows each, from two rows of two columns.
__device__ __forceinline__ uint32_t by_column(uint32_t rows) { return __byte_perm(rows, 0, 0x3120); }

/// Eight E2M1 codes as E4M3 of values over 2^6.
struct ByteCodes {
    uint32_t even, odd;

    __device__ __forceinline__ explicit ByteCodes(uint32_t codes)
        : even(((codes << 4) & 0x80808080u) | ((codes << 2) & 0x1c1c1c1cu)),
          odd((codes & 0x80808080u) | ((codes >> 2) & 0x1c1c1c1cu)) {}
};

/// Eight codes in equal steps, each as the number of steps from the least one.
__device__ __forceinline__ uint32_t from_least(uint32_t codes) {
    return codes ^ 0x88888888u ^ ((codes >> 3) & 0x11111111u) * 7u;
}

/// What the codes of one or two rows are multiplied by: `by`, then `plus` is added; each a pair of BF16.
struct Factor {
    uint32_t by, plus;
};

__device__ __forceinline__ uint16_t bf16_bits(float x) { return __bfloat16_as_ushort(__float2bfloat16(x)); }
/// E4M3, not NaN, to BF16.
__device__ __forceinline__ uint16_t e4m3_bits(uint8_t code) {
    return bf16_bits(__uint_as_float((uint32_t{code} & 0x7fu) << 20) * 0x1p120f);
}

/// Eight elements in order, of 8 (fp8) or 4 bytes of codes. `factor`: of fp8 times 2^120, of nvfp4 with the scale of 16.
__device__ __forceinline__ uint4 expand_fp8(uint32_t a, uint32_t b, uint32_t factor) {
    return {times(low_e4m3(__byte_perm(a, a, 0x1100)), factor),
            times(low_e4m3(__byte_perm(a, a, 0x3322)), factor),
            times(low_e4m3(__byte_perm(b, b, 0x1100)), factor),
            times(low_e4m3(__byte_perm(b, b, 0x3322)), factor)};
}
/// Codes 2j and 2j + 1 in the last four bits of each half; the other bits are of no account.
__device__ __forceinline__ void split_codes(uint32_t codes, uint32_t (&pairs)[4]) {
    const uint32_t odd = codes >> 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = __byte_perm(codes, odd, 0x4400 + j * 0x1111);
}
/// `of16`: lifted_scales; `row`: the row's scale times 2^8.
__device__ __forceinline__ uint4 expand_e2m1(uint32_t codes, uint32_t of16, uint32_t row) {
    uint32_t x[4];
    split_codes(codes, x);
#pragma unroll
    for (uint32_t& pair : x)
        pair = times(times(((pair << 12) & 0x80008000u) | ((pair << 6) & 0x01c001c0u), of16), row);
    return {x[0], x[1], x[2], x[3]};
}
__device__ __forceinline__ uint4 expand_steps(uint32_t codes, const Factor& f) {
    uint32_t x[4];
    split_codes(codes, x);
#pragma unroll
    for (uint32_t& pair : x)
        pair = times_plus(step_magnitudes(pair) ^ ((pair << 12) & 0x80008000u), f.by, f.plus);
    return {x[0], x[1], x[2], x[3]};
}
__device__ __forceinline__ uint4 expand_codes(const Table& t, uint32_t codes, const Factor& f) {
    const Looked a(t, codes), b(t, codes >> 16);
    return {times_plus(a.first(), f.by, f.plus), times_plus(a.second(), f.by, f.plus),
            times_plus(b.first(), f.by, f.plus), times_plus(b.second(), f.by, f.plus)};
}

/// A 16-byte piece of a row's codes, eight elements at a time: put(i, elements). `scale`: the row's one or two; `of16`: of nvfp4
/// the two of the piece's sixteens.
template <class F>
__device__ __forceinline__ void expand_piece(Packing packing, const uint4& x, uint32_t scale, uint32_t of16,
                                             const F& put) {
    const uint32_t s = both(static_cast<uint16_t>(scale));
    if (packing == Packing::fp8) {
        const uint32_t by = times(s, kTwoTo120);
        put(0, expand_fp8(x.x, x.y, by)), put(1, expand_fp8(x.z, x.w, by));
        return;
    }
    const uint32_t codes[4] = {x.x, x.y, x.z, x.w};
    constexpr uint32_t kTwoTo8 = 0x43804380u;
    const uint32_t lifted = times(s, kTwoTo8);
    const Factor by{s, packing == Packing::steps ? both(static_cast<uint16_t>(scale >> 16)) : 0x80008000u};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (packing == Packing::nvfp4)
            put(i,
                expand_e2m1(codes[i], lifted_scales(__byte_perm(of16, 0, i < 2 ? 0x0404 : 0x1414)), lifted));
        else if (packing == Packing::centroids)
            put(i, expand_codes(lloyd(), codes[i], by));
        else
            put(i, expand_steps(codes[i], by));
}

/// The factor of a row's elements: `scale` is its one or two scales, `block` that of 16 elements.
__device__ __forceinline__ Factor factor_of(Packing packing, uint32_t scale, uint8_t block) {
    const uint32_t s = both(static_cast<uint16_t>(scale));
    if (packing == Packing::fp8) return {times(s, kTwoTo120), 0};
    if (packing == Packing::nvfp4) return {times(s, both(e4m3_bits(block))), 0};
    return {s, packing == Packing::steps ? both(static_cast<uint16_t>(scale >> 16)) : 0x80008000u};
}

/// Elements at .. at + 7 of row `place` of a block, in BF16.
__device__ __forceinline__ uint4 load_packed(Packing packing, const Block& b, const char* block, int place,
                                             int at) {
    uint32_t scale = *reinterpret_cast<const uint16_t*>(block + b.scales_at + place * b.scales);
    if (packing == Packing::steps)
        scale |= uint32_t{*reinterpret_cast<const uint16_t*>(block + b.scales_at + place * b.scales + 2)}
                 << 16;
    if (packing == Packing::fp8) {
        const auto* codes = reinterpret_cast<const uint2*>(block + place * b.codes + at);
        return expand_fp8(codes->x, codes->y, factor_of(packing, scale, 0).by);
    }
    uint8_t of16 = 0;
    if (packing == Packing::nvfp4)
        of16 = static_cast<uint8_t>(block[b.blocks_at + place * b.blocks + at / kv::kBlock]);
    const auto codes = *reinterpret_cast<const uint32_t*>(block + place * b.codes + at / 2);
    return expand_codes(table_of(packing), codes, factor_of(packing, scale, of16));
}

}  // namespace quern::cuda::attention::packed
