// NVFP4 weights times few rows of BF16, on FP8 tensor cores (sm_89 on): a code becomes E4M3 by moving bits, and a BF16
// number is the sum of two E4M3 numbers, so every product is exact.
//
//   One mma m16n8k32 covers two blocks of 16 columns, which have scales of their own: its 8 columns are, for each of two
//   rows of x, {high part, low part} x {even block, odd block}, with zeros where the other block's k are. The block's
//   scale meets the FP32 sum. Two mma do the kPassRows rows of a pass.
//
// A row of x is scaled by a power of two so that its largest number lies in [128, 256): numbers down to 2^-14 of it are
// exact, smaller ones to 2^-18 of it. The cards' FP8 sums of 16 products keep at least 13 bits.
// Before sm_89: BF16 products in the same frame; the columns of B are rows of x.
//
// Limit: about 60 instructions a warp for 16 x 64 weights and two rows of x.
#pragma once

#include "ggml-like/cuda/decode.cuh"
#include "ggml-like/cuda/packed.h"

namespace quern::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define QUERN_FP8_MMA 1
#else
#define QUERN_FP8_MMA 0
#endif

inline constexpr int kPassRows = 4;
inline constexpr int kMostParts = 16;
inline constexpr int kFp4Chunk = chunk_bytes(Kind::nvfp4);

/// The sum over a tile's chunks is made of parts, each a run of chunks; parts are added four by four, then the fours. So
/// its bits do not depend on who adds.
struct ChunkParts {
    int chunks;
    int each;   // chunks a part; the last may have fewer
    int count;  // parts

    __host__ __device__ explicit ChunkParts(int n) : chunks(n), each((n + kMostParts - 1) / kMostParts), count((n + each - 1) / each) {}
    __host__ __device__ int begin(int part) const { return part * each; }
    __host__ __device__ int end(int part) const { return part + 1 == count ? chunks : (part + 1) * each; }
};

/// A row of x in shared memory.
__host__ __device__ constexpr int fp4_row_bytes(int chunks) { return chunks * 128; }

/// Packed factors are made for BF16 products of lifted activations; sums of the FP8 form are short of 2^6 only.
#if QUERN_FP8_MMA
inline constexpr float kFp4Lift = 0x1p6f / kSumLift<Kind::nvfp4>;
#else
inline constexpr float kFp4Lift = 1.0f;
#endif

// ---- activations ----

/// {lo, hi} as E4M3, `lo` in the low byte.
__device__ __forceinline__ uint32_t to_e4m3(float lo, float hi) {
#if QUERN_FP8_MMA
    uint16_t v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(hi), "f"(lo));
    return v;
#else
    return 0;
#endif
}
__device__ __forceinline__ float2 from_e4m3(uint32_t two) {
#if QUERN_FP8_MMA
    uint32_t v;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(static_cast<uint16_t>(two)));
    float2 f;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(f.x), "=f"(f.y) : "r"(v));
    return f;
#else
    return {};
#endif
}

/// Four numbers of a row: columns 2t, 2t+1, 2t+8, 2t+9 of a block, unit 4 * block + t.
struct Fp4Unit {
    uint32_t low = 0, high = 0;  // BF16 pairs

    __device__ __forceinline__ void load(const bf16* row, int unit, int columns) {
        const int k = unit / 4 * 16 + unit % 4 * 2;
        if (k >= columns) return;
        low = __ldcg(reinterpret_cast<const uint32_t*>(row + k));
        high = __ldcg(reinterpret_cast<const uint32_t*>(row + k + 8));
    }
    /// Bits of the largest magnitude.
    __device__ __forceinline__ uint32_t most() const {
        const uint32_t a = low & 0x7fff7fffu, b = high & 0x7fff7fffu;
        return max(max(a & 0xffffu, a >> 16), max(b & 0xffffu, b >> 16));
    }
    __device__ __forceinline__ void store(uint8_t* row, int unit, float scale) const {
#if QUERN_FP8_MMA
        const float a = __uint_as_float(low << 16) * scale, b = __uint_as_float(low & 0xffff0000u) * scale;
        const float c = __uint_as_float(high << 16) * scale, d = __uint_as_float(high & 0xffff0000u) * scale;
        const uint32_t ac = to_e4m3(a, c), bd = to_e4m3(b, d);
        const float2 p = from_e4m3(ac), q = from_e4m3(bd);
        const uint32_t rest = to_e4m3((a - p.x) * 16.0f, (c - p.y) * 16.0f) |
                              to_e4m3((b - q.x) * 16.0f, (d - q.y) * 16.0f) << 16;
        const int block = unit / 4, t = unit % 4;
        uint32_t* to = reinterpret_cast<uint32_t*>(row) + block / 4 * 32 + block % 2 * 16 + 2 * t + block / 2 % 2;
        to[0] = ac | bd << 16;
        to[8] = rest;
#else
        const auto lifted = [](uint32_t v) {
            const __nv_bfloat162 p = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&v),
                                             __float2bfloat162_rn(kActivationLift<Kind::nvfp4>));
            return *reinterpret_cast<const uint32_t*>(&p);
        };
        *reinterpret_cast<uint2*>(row + 8 * unit) = make_uint2(lifted(low), lifted(high));
#endif
    }
};

/// The power of two for a row whose largest magnitude has these BF16 bits, and what its sums are multiplied with after.
struct Fp4Scale {
    float up, down;

    __device__ __forceinline__ explicit Fp4Scale(uint32_t most) {
#if QUERN_FP8_MMA
        const uint32_t e = max(most >> 7, 8u);
        up = __uint_as_float((261u - e) << 23);
        down = __uint_as_float(e == 255 ? 0x7fc00000u : (e - 7u) << 23);  // infinities must not come out finite
#else
        up = 1, down = 1;
#endif
    }
};

/// One warp: a row to shared memory. Returns the factor of its sums.
__device__ __forceinline__ float load_fp4_row(uint8_t* to, const bf16* row, int columns, int chunks, int lane) {
    constexpr int kKept = 16;  // units a lane whose loads are under way at the same time
    const int units = chunks * 16;
    Fp4Unit kept[kKept];
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i)
        if (32 * i < units) kept[i].load(row, lane + 32 * i, lane + 32 * i < units ? columns : 0);
#pragma unroll
    for (int i = 0; i < kKept; ++i) most = max(most, kept[i].most());
    for (int u = lane + 32 * kKept; u < units; u += 32) {
        Fp4Unit unit;
        unit.load(row, u, columns);
        most = max(most, unit.most());
    }
    const Fp4Scale scale(__reduce_max_sync(0xffffffffu, most));
#pragma unroll
    for (int i = 0; i < kKept; ++i)
        if (lane + 32 * i < units) kept[i].store(to, lane + 32 * i, scale.up);
    for (int u = lane + 32 * kKept; u < units; u += 32) {
        Fp4Unit unit;
        unit.load(row, u, columns);
        unit.store(to, u, scale.up);
    }
    return scale.down;
}

// ---- products ----

/// A lane's view of the rows of a pass.
struct Fp4Columns {
#if QUERN_FP8_MMA
    const uint8_t* at[2];
#else
    const uint8_t* at[1];
#endif
    /// row_of(i): where row i of the pass lies, 0 <= i < kPassRows (any row for those that do not exist).
    template <typename RowOf>
    __device__ __forceinline__ Fp4Columns(int lane, RowOf&& row_of) {
        const int g = lane >> 2, t = lane & 3;
#if QUERN_FP8_MMA
#pragma unroll
        for (int i = 0; i < 2; ++i) at[i] = row_of(2 * i + (g >> 2)) + (g & 3) * 32 + t * 8;
#else
        at[0] = row_of(g & 3) + t * 8;
#endif
    }
};

#if QUERN_FP8_MMA
/// Codes of two blocks, 4 columns each: E4M3 bytes, values * 2^-6.
__device__ __forceinline__ void decode_e4m3(uint32_t word, uint32_t& even, uint32_t& odd) {
    odd = (word & 0x80808080u) | ((word >> 2) & 0x1c1c1c1cu);
    even = ((word << 4) & 0x80808080u) | ((word << 2) & 0x1c1c1c1cu);
}

__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
#endif

/// acc += chunk `c` of a tile, lying at `chunk`, times the pass's rows; kWide: rows 2 and 3 as well.
template <bool kWide>
__device__ __forceinline__ void multiply_fp4(const uint8_t* chunk, const Fp4Columns& x, int c, int lane,
                                             float (&acc)[2][4]) {
    const uint4 w = *reinterpret_cast<const uint4*>(chunk + 16 * lane);
    const uint2 bytes = *reinterpret_cast<const uint2*>(chunk + 512 + 8 * (lane >> 2));
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#if QUERN_FP8_MMA
    // This lane's sums are of even blocks or of odd ones: their scales, rows g and g + 8.
    const uint32_t own = __byte_perm(bytes.x, bytes.y, lane & 1 ? 0x7531 : 0x6420);
    const float2 low = from_e4m3(own), high = from_e4m3(own >> 16);
    const bool odd_column = lane & 8;
    constexpr int kMma = kWide ? 2 : 1;
    uint2 b[kMma];
#pragma unroll
    for (int n = 0; n < kMma; ++n) b[n] = *reinterpret_cast<const uint2*>(x.at[n] + c * 128);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint32_t a[4];
        decode_e4m3(words[2 * j], a[0], a[2]);
        decode_e4m3(words[2 * j + 1], a[1], a[3]);
        const float s = j ? low.y : low.x, s8 = j ? high.y : high.x;
#pragma unroll
        for (int n = 0; n < kMma; ++n) {
            const uint32_t v = j ? b[n].y : b[n].x;
            float d[4];
            mma_e4m3(d, a, odd_column ? 0u : v, odd_column ? v : 0u);
            acc[n][0] += s * d[0];
            acc[n][1] += s * d[1];
            acc[n][2] += s8 * d[2];
            acc[n][3] += s8 * d[3];
        }
    }
#else
    float low[4], high[4];
    decode_scales(bytes.x, low);
    decode_scales(bytes.y, high);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
        uint32_t a[4];
        decode_nvfp4(words[kk / 2 * 2], words[kk / 2 * 2 + 1], kk % 2, a);
        const uint2 v = *reinterpret_cast<const uint2*>(x.at[0] + c * 128 + 32 * kk);
        float d[4] = {};
        mma(d, a, v.x, v.y);
        acc[0][0] += low[kk] * d[0];
        acc[0][1] += low[kk] * d[1];
        acc[0][2] += high[kk] * d[2];
        acc[0][3] += high[kk] * d[3];
    }
#endif
}

/// The four numbers that make a sum of row 0 of a pass, spread over the lanes 4g + t, t = 0, 1: {x, y} of lane 4g and
/// {x, y} of lane 4g + 1, for weight rows g (low) and g + 8 (high).
struct Fp4Raw {
    float2 low, high;

    __device__ __forceinline__ Fp4Raw(const float (&acc)[2][4], int lane) {
#if QUERN_FP8_MMA
        low = {acc[0][0], acc[0][1]}, high = {acc[0][2], acc[0][3]};
#else
        low = {lane & 1 ? 0.0f : acc[0][0], 0.0f}, high = {lane & 1 ? 0.0f : acc[0][2], 0.0f};
#endif
    }
};
/// The sum from its four numbers: number i in lane 4n + i; all four lanes get it.
__device__ __forceinline__ float join_fp4(float v, int lane) {
    if (lane & 1) v *= 0.0625f;
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

/// The sums of a pass: a lane has those of weight rows g and g + 8 for up to two rows of x.
struct Fp4Sums {
    float low[2], high[2];

    __device__ __forceinline__ explicit Fp4Sums(const float (&acc)[2][4]) {
#if QUERN_FP8_MMA
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = acc[i][0] + 0.0625f * acc[i][1];
            high[i] = acc[i][2] + 0.0625f * acc[i][3];
            low[i] += __shfl_xor_sync(0xffffffffu, low[i], 1);
            high[i] += __shfl_xor_sync(0xffffffffu, high[i], 1);
        }
#else
        low[0] = acc[0][0], low[1] = acc[0][1], high[0] = acc[0][2], high[1] = acc[0][3];
#endif
    }
    /// Row of the pass that low[i] and high[i] are of; kPassRows if of none.
    __device__ __forceinline__ static int row(int lane, int i) {
        const int t = lane & 3;
#if QUERN_FP8_MMA
        return t & 1 ? kPassRows : 2 * i + (t >> 1);
#else
        return t >= 2 ? kPassRows : 2 * t + i;
#endif
    }
};

}  // namespace quern::cuda
