// Attention of answer rows over packed caches: a tile of 64 keys in shared memory, its scores and its values.
//
//   slot    K block | V block     of one page, codes in 16-byte pieces: piece p of row r lies at p ^ swizzled(r)
//
// Codes become operands in registers: a lane reads runs of codes of the rows it has, and which element of d an operand's slot
// stands for follows from that; the query has the same order. The rest is as in decode_math.cuh.
#pragma once

#include "ggml-like/cuda/attention/decode_math.cuh"
#include "ggml-like/cuda/attention/packed.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;
using kv::Packing;

/// A piece's row, mixed so that lanes that read at the same time meet different banks: rows r and r + 1 of K, and rows 2i of V.
__device__ __forceinline__ int swizzled(int r) { return (r >> 1 & 3) << 1 ^ (r & 1) << 2; }

/// K or V of a call: where its blocks are, in memory and in a slot.
struct Pages {
    Packing packing;
    packed::Block block;
    const char* cache;

    __device__ __forceinline__ Pages(Packing p, const kv::Layout& layout, const bf16* data)
        : packing(p), block(layout), cache(reinterpret_cast<const char*>(data)) {}
    __device__ __forceinline__ const char* of(int64_t head) const { return cache + head * block.bytes; }
};

/// Starts copying a block into a slot, by all threads.
__device__ __forceinline__ void start_block(const Pages& pages, const char* from, char* to) {
    const int codes = kTileKeys * pages.block.codes / 16, all = pages.block.bytes / 16;
    const int row_pieces = pages.block.codes / 16;  // 16 or 8
    for (int i = threadIdx.x; i < all; i += kThreads) {
        const int r = i / row_pieces;
        const int at = i < codes ? r * row_pieces + (i % row_pieces ^ swizzled(r)) : i;
        copy_async16(to + at * 16, from + i * 16);
    }
}
__device__ __forceinline__ const char* piece(const Pages& pages, const char* slot, int r, int p) {
    return slot + r * pages.block.codes + ((p ^ swizzled(r)) << 4);
}

/// A lane's run of elements of K: of codes in one piece.
__device__ __forceinline__ int run_of(Packing packing) { return packing == Packing::fp8 ? 16 : 32; }

/// The B operand of S^T from the rotated query: lane l has head l / 4, and of every 4 * run elements those of its own run.
__device__ __forceinline__ void load_query(const AttentionCall& c, const Row& row, int run, Query& q) {
    const int lane = threadIdx.x % 32, head = row.kv_head * row.group + min(lane / 4, row.group - 1);
    const bf16* from = c.rotated + (static_cast<int64_t>(row.t) * c.heads + head) * kDim + lane % 4 * run;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {  // eight elements, two products
        const int at = run == 16 ? i / 2 * 64 + i % 2 * 8 : i / 4 * 128 + i % 4 * 8;
        const uint4 x = *reinterpret_cast<const uint4*>(from + at);
        q.b[2 * i][0] = x.x, q.b[2 * i][1] = x.y, q.b[2 * i + 1][0] = x.z, q.b[2 * i + 1][1] = x.w;
    }
}

/// Two products over the eight elements of a and b, rows l / 4 and l / 4 + 8.
__device__ __forceinline__ void add_eight(float (&s)[2][4], const uint4& a, const uint4& b, const Query& q,
                                          int i) {
    const uint32_t low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
    mma(s[0], low, q.b[2 * i][0], q.b[2 * i][1]);
    mma(s[1], high, q.b[2 * i + 1][0], q.b[2 * i + 1][1]);
}

__device__ __forceinline__ void score_fp8(const Pages& k, const char* slot, int r, const Query& q,
                                          float (&s)[2][4]) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 a = *reinterpret_cast<const uint4*>(piece(k, slot, r, 4 * i + c)),
                    b = *reinterpret_cast<const uint4*>(piece(k, slot, r + 8, 4 * i + c));
        add_eight(s, packed::expand_fp8(a.x, a.y, packed::kTwoTo120),
                  packed::expand_fp8(b.x, b.y, packed::kTwoTo120), q, 2 * i);
        add_eight(s, packed::expand_fp8(a.z, a.w, packed::kTwoTo120),
                  packed::expand_fp8(b.z, b.w, packed::kTwoTo120), q, 2 * i + 1);
    }
}

/// Eight codes of 4 bits, as they are or times the scale of 16.
template <bool kScaled>
__device__ __forceinline__ uint4 eight(const packed::Table& t, uint32_t codes, uint32_t factor) {
    const packed::Looked a(t, codes), b(t, codes >> 16);
    const uint4 x{a.first(), a.second(), b.first(), b.second()};
    if constexpr (!kScaled) return x;
    return {packed::times(x.x, factor), packed::times(x.y, factor), packed::times(x.z, factor),
            packed::times(x.w, factor)};
}
/// The scale of 16 twice.
__device__ __forceinline__ uint32_t scale_pair(uint32_t of16) {
    return packed::both(packed::e4m3_bits(static_cast<uint8_t>(of16)));
}

template <bool kScaled>
__device__ __forceinline__ void score_codes(const Pages& k, const packed::Table& t, const char* slot, int r,
                                            const Query& q, float (&s)[2][4]) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 a = *reinterpret_cast<const uint4*>(piece(k, slot, r, 4 * i + c)),
                    b = *reinterpret_cast<const uint4*>(piece(k, slot, r + 8, 4 * i + c));
        uint32_t sa = 0, sb = 0;  // scales of the run's two sixteens
        if constexpr (kScaled) {
            const char* scales = slot + k.block.blocks_at + 8 * i + 2 * c;
            sa = *reinterpret_cast<const uint16_t*>(scales + r * k.block.blocks);
            sb = *reinterpret_cast<const uint16_t*>(scales + (r + 8) * k.block.blocks);
        }
        const uint32_t codes_a[4] = {a.x, a.y, a.z, a.w}, codes_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t fa = kScaled ? scale_pair(sa >> 8 * half & 0xff) : 0,
                           fb = kScaled ? scale_pair(sb >> 8 * half & 0xff) : 0;
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j)
                add_eight(s, eight<kScaled>(t, codes_a[j], fa), eight<kScaled>(t, codes_b[j], fb), q,
                          4 * i + j);
        }
    }
}

__device__ __forceinline__ float row_scale(const Pages& pages, const char* slot, int r) {
    return as_float(
        *reinterpret_cast<const uint16_t*>(slot + pages.block.scales_at + r * pages.block.scales));
}

/// Scores of the warp's 16 keys, as score() in decode_math.cuh.
__device__ __forceinline__ void score_packed(const Pages& k, const char* slot, const Query& q, int keys_left,
                                             float (&s)[4]) {
    const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * kWarpKeys + lane / 4;
    float parts[2][4] = {};
    if (k.packing == Packing::fp8)
        score_fp8(k, slot, r, q, parts);
    else if (k.packing == Packing::nvfp4)
        score_codes<true>(k, packed::e2m1(), slot, r, q, parts);
    else
        score_codes<false>(k, packed::lloyd(), slot, r, q, parts);
    const float scale[2] = {row_scale(k, slot, r) * score_scale(kDim),
                            row_scale(k, slot, r + 8) * score_scale(kDim)};
#pragma unroll
    for (int e = 0; e < 4; ++e)
        s[e] = lane / 4 + e / 2 * 8 < keys_left ? (parts[0][e] + parts[1][e]) * scale[e / 2] : -INFINITY;
}

/// Two rows' scales as a pair; of rows without a key 0.
__device__ __forceinline__ uint32_t two_scales(const Pages& v, const char* slot, int r, int which,
                                               int keys_left) {
    const char* at = slot + v.block.scales_at + r * v.block.scales + 2 * which;
    const uint32_t a = *reinterpret_cast<const uint16_t*>(at),
                   b = *reinterpret_cast<const uint16_t*>(at + v.block.scales);
    return (r < keys_left ? a : 0) | (r + 1 < keys_left ? b << 16 : 0);
}

/// Eight elements of V's rows r and r + 1, as pairs: x[i] is element i of both.
__device__ __forceinline__ void pairs_fp8(const Pages& v, const char* slot, int r, int at, int keys_left,
                                          uint32_t (&x)[8]) {
    const uint2 a = *reinterpret_cast<const uint2*>(piece(v, slot, r, at / 16) + at % 16),
                b = *reinterpret_cast<const uint2*>(piece(v, slot, r + 1, at / 16) + at % 16);
    const uint32_t factor = packed::times(two_scales(v, slot, r, 0, keys_left), packed::kTwoTo120);
    constexpr uint32_t kSelect[4] = {0x4400, 0x5511, 0x6622, 0x7733};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[i] = packed::times(packed::small_e4m3(__byte_perm(a.x, b.x, kSelect[i])), factor);
        x[i + 4] = packed::times(packed::small_e4m3(__byte_perm(a.y, b.y, kSelect[i])), factor);
    }
}

template <bool kSteps>
__device__ __forceinline__ void pairs_codes(const Pages& v, const packed::Table& t, const char* slot, int r,
                                            int at, int keys_left, uint32_t (&x)[8]) {
    const uint32_t a = *reinterpret_cast<const uint32_t*>(piece(v, slot, r, at / 32) + at % 32 / 2),
                   b = *reinterpret_cast<const uint32_t*>(piece(v, slot, r + 1, at / 32) + at % 32 / 2);
    uint32_t by = two_scales(v, slot, r, 0, keys_left), plus = 0x80008000u;
    if constexpr (kSteps) {
        plus = two_scales(v, slot, r, 1, keys_left);
    } else {
        const char* scales = slot + v.block.blocks_at + r * v.block.blocks + at / kv::kBlock;
        by = packed::times(
            by, packed::e4m3_bits(static_cast<uint8_t>(scales[0])) |
                    uint32_t{packed::e4m3_bits(static_cast<uint8_t>(scales[v.block.blocks]))} << 16);
    }
    const uint32_t low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
    const packed::Looked looked[4] = {{t, low}, {t, low >> 16}, {t, high}, {t, high >> 16}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = packed::times_plus(looked[i].even(), by, plus);
        x[2 * i + 1] = packed::times_plus(looked[i].odd(), by, plus);
    }
}

/// part.o += V^T P^T of a tile. Of its 64 elements the warp has in o[j] rows l / 4 and l / 4 + 8: elements 8 (l / 4) + 2j and
/// + 1.
template <class F>
__device__ __forceinline__ void add_pairs(const Exchange& shared, Part& part, const F& pairs) {
    const int lane = threadIdx.x % 32;
    const int at = threadIdx.x / 32 * kWarpDims + lane / 4 * 8;
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; k += 2) {
        uint32_t p[4];
        load_matrices(
            p, shared_address(shared.p + lane % 8 * kTileKeys * 2 + ((2 * k + lane / 8 ^ lane % 8) << 4)));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t x[8], y[8];
            const int r = (k + h) * 16 + lane % 4 * 2;
            pairs(r, at, x);
            pairs(r + 8, at, y);
#pragma unroll
            for (int j = 0; j < kWarpDims / 16; ++j) {
                const uint32_t a[4] = {x[2 * j], x[2 * j + 1], y[2 * j], y[2 * j + 1]};
                mma(part.o[j], a, p[2 * h], p[2 * h + 1]);
            }
        }
    }
}

__device__ __forceinline__ void add_values_packed(const Pages& v, const char* slot, int keys_left,
                                                  const Exchange& shared, Part& part) {
    if (v.packing == Packing::fp8)
        add_pairs(shared, part,
                  [&](int r, int at, uint32_t(&x)[8]) { pairs_fp8(v, slot, r, at, keys_left, x); });
    else if (v.packing == Packing::nvfp4)
        add_pairs(shared, part, [&](int r, int at, uint32_t(&x)[8]) {
            pairs_codes<false>(v, packed::e2m1(), slot, r, at, keys_left, x);
        });
    else
        add_pairs(shared, part, [&](int r, int at, uint32_t(&x)[8]) {
            pairs_codes<true>(v, packed::uniform(), slot, r, at, keys_left, x);
        });
}

}  // namespace quern::cuda::attention::decode
