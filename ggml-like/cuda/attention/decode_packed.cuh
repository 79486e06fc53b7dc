// Attention of answer rows over packed caches: a warp's 16 keys of a page in shared memory, their scores and their values.
//
//   slot    K | V of a warp's unit: 16 rows each of codes, scales of 16 and scales, as a page has 64 of them; codes in 16-byte
//           pieces: piece p of row r lies at p ^ swizzled(r)
//
//   S^T[16 keys, 8 heads] = K q^T         codes of K become the A operand in registers, q is the B operand
//   O^T[256, 8 heads] += V^T P^T          codes of V likewise; P goes from S to the B operand by `transpose`
//
// A lane reads runs of codes of the rows it has, and which element of d an operand's slot stands for follows from that: the
// query has the same order, and the result is put in order when warps merge (decode_packed_merge.cuh).
//
// Operands are F16: codes of all formats become F16 exactly, in fewer instructions than BF16. q is rounded once, after a power of
// two of its head has brought the largest element to 2^14 .. 2^15; probabilities times V's scales, after one of the warp keeps them
// below 2^15 (WarpPart::unit). Scores and sums have no such limits.
#pragma once

#include "ggml-like/cuda/attention/decode_math.cuh"
#include "ggml-like/cuda/attention/packed.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;
using kv::Packing;

/// A piece's row, mixed so that lanes that read at the same time meet different banks: of K rows r and r + 1, of V rows 2i, or
/// eight rows one after the other.
__device__ __forceinline__ int swizzled(int r) { return (r & 6) ^ (r & 1) * 5; }

/// Where the arrays of a block lie, as the compiler knows them.
template <Packing kOf>
struct BlockOf {
    static constexpr kv::Layout kLayout = kv::layout_of(kOf, DType::BF16, kDim);
    static constexpr Packing kPacking = kOf;
    static constexpr int kCodes = kLayout.codes, kBlocks = kLayout.blocks,
                         kScales = kLayout.scales;  // of a row
    static constexpr int kBlocksAt = static_cast<int>(kLayout.blocks_at());
    static constexpr int kScalesAt = static_cast<int>(kLayout.scales_at());
    static constexpr int kBytes = static_cast<int>(kLayout.head());
    static_assert(kBytes % 16 == 0 && kBlocksAt % 16 == 0 && kScalesAt % 16 == 0);
    // Of a unit in shared memory; a multiple of 128 bytes, so that the exchange of pieces stays within a row.
    static constexpr int kUnitBlocksAt = kWarpKeys * kCodes, kUnitScalesAt = kWarpKeys * (kCodes + kBlocks),
                         kUnitBytes = (kWarpKeys * (kCodes + kBlocks + kScales) + 127) / 128 * 128;
};
/// f(BlockOf<packing>()) of a packing of keys, or of values.
template <class F>
void with_keys(Packing packing, const F& f) {
    if (packing == Packing::fp8)
        f(BlockOf<Packing::fp8>());
    else if (packing == Packing::nvfp4)
        f(BlockOf<Packing::nvfp4>());
    else
        f(BlockOf<Packing::centroids>());
}
template <class F>
void with_values(Packing packing, const F& f) {
    if (packing == Packing::fp8)
        f(BlockOf<Packing::fp8>());
    else if (packing == Packing::nvfp4)
        f(BlockOf<Packing::nvfp4>());
    else
        f(BlockOf<Packing::steps>());
}

__device__ __forceinline__ void copy_piece(uint32_t to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
template <class T>
__device__ __forceinline__ T shared_at(uint32_t address) {
    return *static_cast<const T*>(__cvta_shared_to_generic(address));
}

/// Copies of the warp's rows of a block into a slot: what a lane copies, of the cache's first block of the head and to the first
/// slot. Of scales there are fewer pieces than lanes: some copy the same.
template <class B>
struct Copier {
    static constexpr int kPieces = B::kCodes / 16,
                         kRows = 32 / kPieces;  // of a row; of the warp's copies at once

    const char* from;
    int scales, scales_of_unit;  // from the block to its piece of scales, and from there to the next unit's
    uint32_t to, scales_to;      // the same in the slot

    __device__ __forceinline__ Copier(const void* cache, int kv_head, uint32_t slot) {
        const int lane = threadIdx.x % 32, r = lane / kPieces;
        // a row of scales for each 16 elements, then eight rows of one, four of two
        const int piece = min(lane, B::kBlocks + B::kScales - 1), of_scales = piece - B::kBlocks;
        from = static_cast<const char*>(cache) + kv_head * B::kBytes;
        scales = of_scales < 0 ? B::kBlocksAt + piece * 16 : B::kScalesAt + of_scales * 16;
        scales_of_unit = of_scales < 0 ? kWarpKeys * B::kBlocks : kWarpKeys * B::kScales;
        to = slot + r * B::kCodes + ((lane % kPieces ^ swizzled(r)) << 4);
        scales_to =
            slot + (of_scales < 0 ? B::kUnitBlocksAt + piece * 16 : B::kUnitScalesAt + of_scales * 16);
    }
    /// `block`: from the head's first block to that of the page; `unit`: of its four; `slot`: from the first slot to the one to
    /// fill.
    __device__ __forceinline__ void start(int64_t block, int unit, uint32_t slot) const {
        const char* base = from + block;
        const char* codes = base + unit * (kWarpKeys * B::kCodes) + threadIdx.x % 32 * 16;
#pragma unroll
        for (int i = 0; i < kWarpKeys / kRows; ++i)
            copy_piece(((to + slot) ^ ((i * kRows & 6) << 4)) + i * 512, codes + i * 512);
        copy_piece(scales_to + slot, base + scales + unit * scales_of_unit);
    }
};

/// The same, but as something that the compiler cannot compute again wherever it is used.
__device__ __forceinline__ uint32_t kept(uint32_t x) { return __shfl_sync(0xffffffffu, x, threadIdx.x % 32); }

/// Where a lane reads its part of a warp's 16 keys and values in the first slot.
template <class K, class V>
struct LaneAt {
    uint32_t keys, of16;         // codes of row l / 4 of K, and their scales of 16
    uint32_t values, values_16;  // of V's rows and pieces as products take them
    uint32_t rows, rows_v;       // scales of rows l / 4

    __device__ __forceinline__ explicit LaneAt(uint32_t slot) {
        const int lane = threadIdx.x % 32, g = lane / 4;
        keys = slot + g * K::kCodes + ((lane % 4 ^ swizzled(g)) << 4);
        of16 = slot + K::kUnitBlocksAt + g * K::kBlocks + lane % 4 * 2;
        rows = slot + K::kUnitScalesAt + g * K::kScales;
        keys = kept(keys);
        slot += K::kUnitBytes;
        rows_v = slot + V::kUnitScalesAt + g * V::kScales;
        values_16 = slot + V::kUnitBlocksAt + lane % 16 * V::kBlocks;
        if constexpr (V::kPacking == Packing::nvfp4)
            values = slot + lane % 4 * 2 * V::kCodes + ((g ^ swizzled(lane % 4 * 2)) << 4);
        else
            values = slot + lane % 16 * V::kCodes + ((lane / 16 ^ swizzled(lane % 8)) << 4);
        values = kept(values);
    }
};

// What codes become, and what is left to multiply by: e2m1 times its scale of 16 a value over 2^6, equal steps counted from the
// least one their number over 2^24 or over 2^20, the others their value. Rows' scales multiply scores of K, and probabilities of
// V's rows.

/// What a score of raw products is multiplied by beside the row's scale and the head's.
__device__ __forceinline__ constexpr float lift_of_scores(Packing packing) {
    return packing == Packing::nvfp4 ? 0x1p6f : 1.0f;
}
/// Of rows l / 4 of products of V, and of rows l / 4 + 8.
__device__ __forceinline__ constexpr float lift_of_values(Packing packing, int half) {
    if (packing == Packing::steps) return half == 0 ? 0x1p24f : 0x1p20f;
    return packing == Packing::nvfp4 ? 0x1p6f : 1.0f;
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
}

/// q in shared memory as the B operand of S^T. Products take 64 elements at a time, four of them: lane l has head l / 4, and of the
/// keys' codes 16 that follow each other, so their first eight elements in [.][0][l] and the others in [.][1][l].
struct SharedQuery {
    uint4 pairs[kDim / 64][2][32];
    float lifts[kHeads];  // what a head's raw products are multiplied by beside rows' scales
};
/// Puts a head where it belongs, of which lane l has elements 8l .. 8l+7.
template <class K>
__device__ __forceinline__ void put_query(SharedQuery& q, int head, const float (&x)[8]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    const uint32_t exponent = __reduce_max_sync(0xffffffffu, most) >> 23, up = min(268 - exponent, 253u);
    const float by = __uint_as_float(up << 23);
    uint4 pairs{pack_half(x[0] * by, x[1] * by), pack_half(x[2] * by, x[3] * by),
                pack_half(x[4] * by, x[5] * by), pack_half(x[6] * by, x[7] * by)};
    if constexpr (K::kPacking == Packing::nvfp4)  // as codes come out: 0 2, 1 3, 4 6, 5 7
        pairs = {__byte_perm(pairs.x, pairs.y, 0x5410), __byte_perm(pairs.x, pairs.y, 0x7632),
                 __byte_perm(pairs.z, pairs.w, 0x5410), __byte_perm(pairs.z, pairs.w, 0x7632)};
    // a lane's 16 codes: of fp8 a piece, of 4 bits half of one
    const int eighth = threadIdx.x % 32;
    const int step = K::kPacking == Packing::fp8 ? eighth / 8 : eighth / 16 * 2 + eighth / 2 % 2;
    const int c = K::kPacking == Packing::fp8 ? eighth / 2 % 4 : eighth / 4 % 4;
    q.pairs[step][eighth % 2][head * 4 + c] = pairs;
    if (eighth == 0)
        q.lifts[head] = __uint_as_float((254 - up) << 23) * (score_scale(kDim) * lift_of_scores(K::kPacking));
}

/// mma() in F16.
__device__ __forceinline__ void mma_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Sums of products that do not wait for each other.
using Sums = float[2][4];

/// Two products over eight elements of rows l / 4 and l / 4 + 8 as pairs.
__device__ __forceinline__ void add_eight(Sums& s, const uint32_t (&x)[4], const uint32_t (&y)[4],
                                          const uint4& q) {
    const uint32_t low[4] = {x[0], y[0], x[1], y[1]}, high[4] = {x[2], y[2], x[3], y[3]};
    mma_half(s[0], low, q.x, q.y);
    mma_half(s[1], high, q.z, q.w);
}

/// Eight codes of 4 bits of K, `of16` their scale twice.
template <class K>
__device__ __forceinline__ void expand_key(uint32_t codes, uint32_t of16, uint32_t (&x)[4]) {
    if constexpr (K::kPacking == Packing::nvfp4) {
        const packed::ByteCodes bytes(codes);
        packed::halves_of(bytes.even, x[0], x[2]), packed::halves_of(bytes.odd, x[1], x[3]);
#pragma unroll
        for (uint32_t& pair : x) pair = packed::times_half(pair, of16);
    } else {
        const packed::Table table = packed::lloyd_half();
        const packed::Looked a(table, codes), b(table, codes >> 16);
        x[0] = a.first(), x[1] = a.second(), x[2] = b.first(), x[3] = b.second();
    }
}

/// The warp's scores without scales. A loop, since instructions that have not run for a while take longer to come than to run.
template <class K>
__device__ __forceinline__ void score_products(uint32_t keys, uint32_t of16, const SharedQuery& q, Sums& s) {
    const int lane = threadIdx.x % 32;
    if constexpr (K::kPacking == Packing::fp8) {
#pragma unroll 2
        for (int i = 0; i < kDim / 64; ++i) {
            const uint32_t at = (keys ^ (i % 2 << 6)) + i / 2 * 128;
            const uint4 a = shared_at<uint4>(at), b = shared_at<uint4>(at + 8 * K::kCodes);
            const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint32_t low[4], high[4];
                packed::halves_of(x[2 * j], low[0], low[1]), packed::halves_of(x[2 * j + 1], low[2], low[3]);
                packed::halves_of(y[2 * j], high[0], high[1]),
                    packed::halves_of(y[2 * j + 1], high[2], high[3]);
                add_eight(s, low, high, q.pairs[i][j][lane]);
            }
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < kDim / 128; ++i) {
            const uint32_t at = keys ^ (i << 6);
            const uint4 a = shared_at<uint4>(at), b = shared_at<uint4>(at + 8 * K::kCodes);
            const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
            uint32_t a_16 = 0, b_16 = 0, unused;
            if constexpr (K::kBlocks > 0) {
                packed::halves_of(shared_at<uint16_t>(of16 + i * 8), a_16, unused);
                packed::halves_of(shared_at<uint16_t>(of16 + i * 8 + 8 * K::kBlocks), b_16, unused);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t low[4], high[4];
                expand_key<K>(x[j], packed::half_twice(a_16, j / 2), low);
                expand_key<K>(y[j], packed::half_twice(b_16, j / 2), high);
                add_eight(s, low, high, q.pairs[2 * i + j / 2][j % 2][lane]);
            }
        }
    }
}

/// Scores of the warp's 16 keys, as score() in decode_math.cuh. `slot`: from the first slot.
template <class K, class V>
__device__ __forceinline__ void score_packed(const LaneAt<K, V>& at, uint32_t slot, const SharedQuery& q,
                                             int keys_left, float (&s)[4]) {
    Sums parts = {};
    const float rows[2] = {as_float(shared_at<uint16_t>(at.rows + slot)),
                           as_float(shared_at<uint16_t>(at.rows + slot + 8 * K::kScales))};
    score_products<K>(at.keys + slot, at.of16 + slot, q, parts);
    const float2 lifts = *reinterpret_cast<const float2*>(q.lifts + threadIdx.x % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e)
        s[e] = (parts[0][e] + parts[1][e]) * (rows[e / 2] * (e % 2 == 0 ? lifts.x : lifts.y));
    if (keys_left < kWarpKeys) {
        const int r = threadIdx.x % 32 / 4;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (r + e / 2 * 8 >= keys_left) s[e] = -INFINITY;
    }
}

/// The warp's running result, of heads 2(l%4) + {0, 1}: values times `unit`, a power of two, not yet divided by the sum, of the
/// elements that element() says (decode_packed_merge.cuh); what exponents are relative to; the lane's own addends of the sum, and
/// of what all elements have in common (`steps`).
struct WarpPart {
    float o[kDim / 16][4];
    float ceiling[2], sum[2], middle[2], unit;
};
__device__ __forceinline__ void clear(WarpPart& part) {
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) part.o[j][e] = 0;
    part.ceiling[0] = part.ceiling[1] = -INFINITY;
    part.sum[0] = part.sum[1] = part.middle[0] = part.middle[1] = 0;
    part.unit = 0x1p100f;
}

/// 1 / x of a power of two.
__device__ __forceinline__ float over_power(float x) {
    return __uint_as_float((254u << 23) - __float_as_uint(x));
}

/// A score above its head's ceiling raises that to this much above the highest score, so that it seldom happens again.
constexpr float kRoom = 8;
/// What scales of V's rows times `unit` stay below, and where one beyond brings them: as seldom.
constexpr float kMostScale = 0x1p15f;
constexpr int kScaleExponent = 12;

/// `scales`: of V's rows l / 4 and l / 4 + 8.
__device__ __forceinline__ void raise_ceilings(const float (&s)[4], const float (&scales)[2],
                                               WarpPart& part) {
    const bool above = fmaxf(s[0], s[2]) > part.ceiling[0] || fmaxf(s[1], s[3]) > part.ceiling[1] ||
                       fmaxf(scales[0], scales[1]) * part.unit > kMostScale;
    if (!__any_sync(0xffffffffu, above)) return;
    const bool first = __all_sync(0xffffffffu, fmaxf(part.ceiling[0], part.ceiling[1]) == -INFINITY);
    float f[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float highest = over_keys_max(fmaxf(s[h], s[h + 2])), before = part.ceiling[h];
        part.ceiling[h] = highest > before ? highest + kRoom : before;
        f[h] = part_weight(before, part.ceiling[h]);
    }
    const float scale = over_keys_max(fmaxf(scales[0], scales[1]));
    float g = 1;
    if (scale * part.unit > kMostScale) {
        // 2^100 at most, and not so little that what it is divided by overflows
        const uint32_t exponent = min(__float_as_uint(scale) >> 23, 127u + 112u);
        const float unit = __uint_as_float((254 + kScaleExponent - exponent) << 23);
        g = unit * over_power(part.unit), part.unit = unit;
    }
    if (first) return;  // nothing to rescale
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        part.sum[h] *= f[h], part.middle[h] *= f[h], f[h] *= g;
#pragma unroll
        for (int j = 0; j < kDim / 16; ++j) part.o[j][h] *= f[h], part.o[j][h + 2] *= f[h];
    }
}

/// Scores become probabilities times their values' scales, as the B operand. Values in equal steps have a least one beside the
/// scale, the same for all elements of a row: sums of these are apart (WarpPart::middle).
template <class V>
__device__ __forceinline__ void weigh(uint32_t rows, float (&s)[4], WarpPart& part, uint32_t (&p)[2]) {
    float scales[2], least[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if constexpr (V::kPacking == Packing::steps) {
            const uint32_t both = shared_at<uint32_t>(rows + half * 8 * V::kScales);
            scales[half] = __uint_as_float(both << 16);
            least[half] = fmaf(scales[half], -7.5f, __uint_as_float(both & 0xffff0000u));
        } else {
            scales[half] = as_float(shared_at<uint16_t>(rows + half * 8 * V::kScales));
        }
    raise_ceilings(s, scales, part);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float scale = scales[half] * part.unit;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float& x = s[2 * half + h];
            x = fast_exp2(x - part.ceiling[h]);
            part.sum[h] += x;
            if constexpr (V::kPacking == Packing::steps)
                part.middle[h] = fmaf(x, least[half], part.middle[h]);
            x *= scale;
        }
    }
    p[0] = transpose(pack_half(s[0], s[1])), p[1] = transpose(pack_half(s[2], s[3]));
}

/// Words of 16 bits of V's rows in pairs, two rows' in each register: of two pieces that follow each other rows 2(l%4), + 1 and
/// + 8, + 9 of the first, then of the second piece; word l / 4 of each.
__device__ __forceinline__ void load_pairs(uint32_t values, int two_pieces, uint32_t (&v)[4]) {
    load_matrices_transposed(v, (values ^ ((2 * two_pieces & 6) << 4)) + two_pieces / 4 * 128);
}

__device__ __forceinline__ void add_fp8(uint32_t values, const uint32_t (&p)[2], WarpPart& part) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
        uint32_t v[4];
        load_pairs(values, i, v);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t a[4];
            packed::halves_of(packed::by_column(v[2 * h]), a[0], a[1]);
            packed::halves_of(packed::by_column(v[2 * h + 1]), a[2], a[3]);
            mma_half(part.o[2 * i + h], a, p[0], p[1]);
        }
    }
}

__device__ __forceinline__ void add_steps(uint32_t values, const uint32_t (&p)[2], WarpPart& part) {
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) {
        uint32_t v[4];
        load_pairs(values, i, v);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t x = packed::from_least(v[2 * h]), y = packed::from_least(v[2 * h + 1]);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint32_t a = x >> 8 * k, b = y >> 8 * k;
                const uint32_t pairs[4] = {a & 0x000f000fu, a & 0x00f000f0u, b & 0x000f000fu,
                                           b & 0x00f000f0u};  // subnormal, and exact
                mma_half(part.o[4 * i + 2 * h + k], pairs, p[0], p[1]);
            }
        }
    }
}

/// A lane has piece l / 4 of V's rows, two blocks of 16, since scales take more instructions than pairs.
__device__ __forceinline__ void add_nvfp4(uint32_t values, uint32_t blocks, const uint32_t (&p)[2],
                                          WarpPart& part) {
    using V = BlockOf<Packing::nvfp4>;
    uint4 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        rows[i] = shared_at<uint4>((values ^ (i % 2 * 5 << 4)) + (i / 2 * 8 + i % 2) * V::kCodes);
    // scales of 16 of rows 2(l%4), + 1, and of + 8, + 9: of elements 32(l/4), and of 16 more
    uint32_t scales[2], by[2][2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(scales[0]), "=r"(scales[1])
                 : "r"(blocks));
#pragma unroll
    for (int i = 0; i < 2; ++i) packed::halves_of(packed::by_column(scales[i]), by[0][i], by[1][i]);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        uint32_t pairs[2][2][4];  // rows and the ones eight on; even and odd codes
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto word = [&](const uint4& x) {
                return w == 0 ? x.x : w == 1 ? x.y : w == 2 ? x.z : x.w;
            };
            const packed::ByteCodes a(word(rows[2 * i])), b(word(rows[2 * i + 1]));
            packed::halves_of(__byte_perm(a.even, b.even, 0x5140), pairs[i][0][0], pairs[i][0][1]);
            packed::halves_of(__byte_perm(a.even, b.even, 0x7362), pairs[i][0][2], pairs[i][0][3]);
            packed::halves_of(__byte_perm(a.odd, b.odd, 0x5140), pairs[i][1][0], pairs[i][1][1]);
            packed::halves_of(__byte_perm(a.odd, b.odd, 0x7362), pairs[i][1][2], pairs[i][1][3]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = packed::times_half(pairs[i / 2][i % 2][j], by[w / 2][i / 2]);
            mma_half(part.o[4 * w + j], a, p[0], p[1]);
        }
    }
}

/// Zeros for scales, and codes that may be no number, of V's rows of the warp from `keys_left` on, of which nobody knows what
/// they are.
template <class V>
__device__ __forceinline__ void clear_rows(uint32_t slot, int keys_left) {
    const int lane = threadIdx.x % 32;
    const auto zero = [&](int at, int row_bytes) {
        const uint32_t rows = slot + at;
        for (int i = keys_left * row_bytes + lane * 16; i < kWarpKeys * row_bytes; i += 32 * 16)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(rows + i), "r"(0) : "memory");
    };
    if constexpr (V::kPacking == Packing::fp8) zero(0, V::kCodes);
    if constexpr (V::kBlocks > 0) zero(V::kUnitBlocksAt, V::kBlocks);
    if (lane * 2 >= keys_left * V::kScales && lane * 2 < kWarpKeys * V::kScales)
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(slot + V::kUnitScalesAt + lane * 2), "h"(uint16_t{0})
                     : "memory");
    __syncwarp();
}

/// part += V^T P^T of the warp's 16 keys, of which s are the scores. `slot`: from the first slot.
template <class K, class V>
__device__ __forceinline__ void add_values(const LaneAt<K, V>& at, uint32_t slot, float (&s)[4],
                                           WarpPart& part) {
    uint32_t p[2];
    weigh<V>(at.rows_v + slot, s, part, p);
    if constexpr (V::kPacking == Packing::fp8)
        add_fp8(at.values + slot, p, part);
    else if constexpr (V::kPacking == Packing::nvfp4)
        add_nvfp4(at.values + slot, at.values_16 + slot, p, part);
    else
        add_steps(at.values + slot, p, part);
}

}  // namespace quern::cuda::attention::decode
