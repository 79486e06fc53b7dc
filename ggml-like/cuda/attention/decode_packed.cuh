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
    int from, to;  // the thread's first piece of codes in a block and in a slot
    int rest;      // how many pieces follow the codes

    __device__ __forceinline__ Pages(Packing p, const kv::Layout& layout, const bf16* data)
        : packing(p), block(layout), cache(reinterpret_cast<const char*>(data)) {
        const int thread = threadIdx.x, bits = p == Packing::fp8 ? 4 : 3, r = thread >> bits;
        const int mixed = r << bits | ((thread & ((1 << bits) - 1)) ^ swizzled(r));
        from = thread * 16, to = mixed * 16, rest = (block.bytes - kTileKeys * block.codes) / 16;
    }
    __device__ __forceinline__ const char* of(int64_t head) const { return cache + head * block.bytes; }
};

/// Starts copying a block into a slot, by all threads. Their pieces of codes are kThreads apart, in rows that are mixed alike.
__device__ __forceinline__ void start_block(const Pages& pages, const char* from, char* to) {
    const char* source = from + pages.from;
    char* target = to + pages.to;
    constexpr int kStep = kThreads * 16, kHalf = 4;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) copy_async16(target + i * kStep, source + i * kStep);
    if (pages.packing == Packing::fp8)
#pragma unroll
        for (int i = kHalf; i < 2 * kHalf; ++i) copy_async16(target + i * kStep, source + i * kStep);
    if (static_cast<int>(threadIdx.x) < pages.rest)
        copy_async16(to + pages.block.blocks_at + pages.from, from + pages.block.blocks_at + pages.from);
}
__device__ __forceinline__ const char* piece(const Pages& pages, const char* slot, int r, int p) {
    return slot + r * pages.block.codes + ((p ^ swizzled(r)) << 4);
}

// What codes become, and what is left to multiply by: fp8 a value over 2^120 (q has 2^60 of it), e2m1 times its scale of 16 a
// value over 2^8, the others their value. Rows' scales multiply scores of K, and probabilities of V's rows.

/// What a score of raw products is multiplied by beside the row's scale.
__device__ __forceinline__ float lift_of_scores(Packing packing) {
    return packing == Packing::fp8 ? 0x1p60f : packing == Packing::nvfp4 ? 0x1p8f : 1.0f;
}
__device__ __forceinline__ float lift_of_values(Packing packing) {
    return packing == Packing::fp8 ? 0x1p120f : packing == Packing::nvfp4 ? 0x1p8f : 1.0f;
}

/// The lane's eight elements of q as pairs, in the order in which codes of K come out.
__device__ __forceinline__ uint4 ordered(Packing packing, const uint4& x) {
    if (packing == Packing::fp8) {  // 0 2, 1 3, 4 6, 5 7
        constexpr uint32_t kLift = 0x5d805d80u;
        return {packed::times(__byte_perm(x.x, x.y, 0x5410), kLift),
                packed::times(__byte_perm(x.x, x.y, 0x7632), kLift),
                packed::times(__byte_perm(x.z, x.w, 0x5410), kLift),
                packed::times(__byte_perm(x.z, x.w, 0x7632), kLift)};
    }
    if (packing == Packing::nvfp4)  // 0 4, 1 5, 2 6, 3 7
        return {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                __byte_perm(x.y, x.w, 0x7632)};
    return x;
}

/// Bytes from a head of q in shared memory to the next, so that they meet other banks.
constexpr int kQueryRow = kDim * 2 + 16;

/// The B operand of S^T from q's heads in shared memory: lane l has head l / 4, and of every 4 * run elements those of its own
/// run, the codes of one piece.
__device__ __forceinline__ void load_query(const char* heads, int group, Packing packing, Query& q) {
    const int lane = threadIdx.x % 32, run = packing == Packing::fp8 ? 16 : 32;
    const char* from = heads + min(lane / 4, group - 1) * kQueryRow + lane % 4 * run * 2;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {  // eight elements, two products
        const int at = run == 16 ? i / 2 * 64 + i % 2 * 8 : i / 4 * 128 + i % 4 * 8;
        const uint4 x = ordered(packing, *reinterpret_cast<const uint4*>(from + at * 2));
        q.b[2 * i][0] = x.x, q.b[2 * i][1] = x.y, q.b[2 * i + 1][0] = x.z, q.b[2 * i + 1][1] = x.w;
    }
}

/// Sums of products that do not wait for each other.
using Sums = float[4][4];

__device__ __forceinline__ void score_fp8(const Pages& k, const char* slot, int r, const Query& q, Sums& s) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 a = *reinterpret_cast<const uint4*>(piece(k, slot, r, 4 * i + c)),
                    b = *reinterpret_cast<const uint4*>(piece(k, slot, r + 8, 4 * i + c));
        const uint32_t codes_a[4] = {a.x, a.y, a.z, a.w}, codes_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t operand[4] = {packed::low_e4m3(codes_a[j]), packed::low_e4m3(codes_b[j]),
                                         packed::high_e4m3(codes_a[j]), packed::high_e4m3(codes_b[j])};
            mma(s[j], operand, q.b[4 * i + j][0], q.b[4 * i + j][1]);
        }
    }
}

/// Two products over eight codes of 4 bits of rows l / 4 and l / 4 + 8.
template <class F>
__device__ __forceinline__ void add_eight(Sums& s, uint32_t a, uint32_t b, const Query& q, int i,
                                          const F& expand) {
    uint32_t x[4], y[4];
    expand(a, x, false), expand(b, y, true);
    const uint32_t low[4] = {x[0], y[0], x[1], y[1]}, high[4] = {x[2], y[2], x[3], y[3]};
    mma(s[2 * (i % 2)], low, q.b[2 * i][0], q.b[2 * i][1]);
    mma(s[2 * (i % 2) + 1], high, q.b[2 * i + 1][0], q.b[2 * i + 1][1]);
}

/// Two scales of 16, each twice (packed::lifted_scales).
__device__ __forceinline__ void scale_pairs(uint32_t two, uint32_t (&pairs)[2]) {
    pairs[0] = packed::lifted_scales(__byte_perm(two, 0, 0x0404));
    pairs[1] = packed::lifted_scales(__byte_perm(two, 0, 0x1414));
}

__device__ __forceinline__ void score_nvfp4(const Pages& k, const char* slot, int r, const Query& q,
                                            Sums& s) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 a = *reinterpret_cast<const uint4*>(piece(k, slot, r, 4 * i + c)),
                    b = *reinterpret_cast<const uint4*>(piece(k, slot, r + 8, 4 * i + c));
        const char* scales = slot + k.block.blocks_at + 8 * i + 2 * c + r * (kDim / kv::kBlock);
        uint32_t of_a[2], of_b[2];
        scale_pairs(*reinterpret_cast<const uint16_t*>(scales), of_a);
        scale_pairs(*reinterpret_cast<const uint16_t*>(scales + 8 * (kDim / kv::kBlock)), of_b);
        const uint32_t codes_a[4] = {a.x, a.y, a.z, a.w}, codes_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            add_eight(s, codes_a[j], codes_b[j], q, 4 * i + j,
                      [&](uint32_t codes, uint32_t(&x)[4], bool second) {
                          packed::small_e2m1(codes, x);
                          const uint32_t by = second ? of_b[j / 2] : of_a[j / 2];
#pragma unroll
                          for (uint32_t& pair : x) pair = packed::times(pair, by);
                      });
    }
}

__device__ __forceinline__ void score_centroids(const Pages& k, const char* slot, int r, const Query& q,
                                                Sums& s) {
    const int c = threadIdx.x % 4;
    const packed::Table table = packed::lloyd();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 a = *reinterpret_cast<const uint4*>(piece(k, slot, r, 4 * i + c)),
                    b = *reinterpret_cast<const uint4*>(piece(k, slot, r + 8, 4 * i + c));
        const uint32_t codes_a[4] = {a.x, a.y, a.z, a.w}, codes_b[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            add_eight(s, codes_a[j], codes_b[j], q, 4 * i + j, [&](uint32_t codes, uint32_t(&x)[4], bool) {
                const packed::Looked low(table, codes), high(table, codes >> 16);
                x[0] = low.first(), x[1] = low.second(), x[2] = high.first(), x[3] = high.second();
            });
    }
}

/// Of K or V, number `which`.
__device__ __forceinline__ float row_scale(const Pages& pages, const char* slot, int r, int which = 0) {
    const char* at = slot + pages.block.scales_at + r * pages.block.scales + 2 * which;
    return as_float(*reinterpret_cast<const uint16_t*>(at));
}

/// Scores of the warp's 16 keys, as score() in decode_math.cuh.
__device__ __forceinline__ void score_packed(const Pages& k, const char* slot, const Query& q, int keys_left,
                                             float (&s)[4]) {
    const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * kWarpKeys + lane / 4;
    Sums parts = {};
    if (k.packing == Packing::fp8)
        score_fp8(k, slot, r, q, parts);
    else if (k.packing == Packing::nvfp4)
        score_nvfp4(k, slot, r, q, parts);
    else
        score_centroids(k, slot, r, q, parts);
    const float lift = score_scale(kDim) * lift_of_scores(k.packing);
    const float scale[2] = {row_scale(k, slot, r) * lift, row_scale(k, slot, r + 8) * lift};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float sum = (parts[0][e] + parts[1][e]) + (parts[2][e] + parts[3][e]);
        s[e] = lane / 4 + e / 2 * 8 < keys_left ? sum * scale[e / 2] : -INFINITY;
    }
}

/// The warp's scores become probabilities times their values' scales, in shared memory for all warps. Values in equal steps
/// have a middle beside the scale, the same for all elements of a row: sums of these are apart (Part::middle).
__device__ __forceinline__ void share_weights(const Pages& v, const char* slot, int keys_left, float (&s)[4],
                                              Exchange& shared, Part& part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = lane / 4;
    const float lift = lift_of_values(v.packing);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int key = lane / 4 + 8 * half, r = warp * kWarpKeys + key;
        const bool there = key < keys_left;  // what lies beyond may be NaN
        const float scale = there ? row_scale(v, slot, r) * lift : 0.0f;
        const float middle = v.packing == Packing::steps && there ? row_scale(v, slot, r, 1) : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float& x = s[2 * half + h];
            x = fast_exp2(x - part.maximum[h]);
            part.sum[h] += x;
            part.middle[h] = fmaf(x, middle, part.middle[h]);
            x *= scale;
        }
    }
    char* to = shared.p + head * kTileKeys * 2 + lane % 4 * 4;
    *reinterpret_cast<uint32_t*>(to + ((2 * warp ^ head) << 4)) = transpose(pack_bf16(s[0], s[1]));
    *reinterpret_cast<uint32_t*>(to + ((2 * warp + 1 ^ head) << 4)) = transpose(pack_bf16(s[2], s[3]));
}

/// Eight elements of V's rows r and r + 1, as pairs: x[i] is element i of both, without the rows' scales.
__device__ __forceinline__ void pairs_fp8(const Pages& v, const char* slot, int r, int at, uint32_t (&x)[8]) {
    const uint2 a = *reinterpret_cast<const uint2*>(piece(v, slot, r, at / 16) + at % 16),
                b = *reinterpret_cast<const uint2*>(piece(v, slot, r + 1, at / 16) + at % 16);
    const uint32_t both[4] = {__byte_perm(a.x, b.x, 0x5410), __byte_perm(a.x, b.x, 0x7632),
                              __byte_perm(a.y, b.y, 0x5410), __byte_perm(a.y, b.y, 0x7632)};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        x[2 * i] = packed::low_e4m3(both[i]), x[2 * i + 1] = packed::high_e4m3(both[i]);
}

template <class F>
__device__ __forceinline__ void pairs_codes(const Pages& v, const char* slot, int r, int at, const F& expand,
                                            uint32_t (&x)[8]) {
    const uint32_t a = *reinterpret_cast<const uint32_t*>(piece(v, slot, r, at / 32) + at % 32 / 2),
                   b = *reinterpret_cast<const uint32_t*>(piece(v, slot, r + 1, at / 32) + at % 32 / 2);
    uint32_t low[4], high[4];
    expand(__byte_perm(a, b, 0x5410), low), expand(__byte_perm(a, b, 0x7632), high);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = low[i], x[i + 4] = high[i];
}
__device__ __forceinline__ void pairs_nvfp4(const Pages& v, const char* slot, int r, int at,
                                            uint32_t (&x)[8]) {
    const char* scales = slot + v.block.blocks_at + r * (kDim / kv::kBlock) + at / kv::kBlock;
    const uint32_t a = static_cast<uint8_t>(scales[0]), b = static_cast<uint8_t>(scales[kDim / kv::kBlock]);
    const uint32_t by = packed::lifted_scales(a << 8 | b << 24);
    pairs_codes(
        v, slot, r, at, [](uint32_t codes, uint32_t(&y)[4]) { packed::small_e2m1(codes, y); }, x);
#pragma unroll
    for (uint32_t& pair : x) pair = packed::times(pair, by);
}
__device__ __forceinline__ void pairs_steps(const Pages& v, const char* slot, int r, int at,
                                            uint32_t (&x)[8]) {
    pairs_codes(
        v, slot, r, at, [](uint32_t codes, uint32_t(&y)[4]) { packed::steps_of(codes, y); }, x);
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

__device__ __forceinline__ void add_values_packed(const Pages& v, const char* slot, const Exchange& shared,
                                                  Part& part) {
    if (v.packing == Packing::fp8)
        add_pairs(shared, part, [&](int r, int at, uint32_t(&x)[8]) { pairs_fp8(v, slot, r, at, x); });
    else if (v.packing == Packing::nvfp4)
        add_pairs(shared, part, [&](int r, int at, uint32_t(&x)[8]) { pairs_nvfp4(v, slot, r, at, x); });
    else
        add_pairs(shared, part, [&](int r, int at, uint32_t(&x)[8]) { pairs_steps(v, slot, r, at, x); });
}

}  // namespace quern::cuda::attention::decode
