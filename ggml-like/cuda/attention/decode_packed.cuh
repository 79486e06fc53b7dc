// Attention of answer rows over packed caches: a warp's 16 keys of a page in shared memory, their scores and their values.
//
//   slot    K block | V block     of one page, codes in 16-byte pieces: piece p of row r lies at p ^ swizzled(r)
//   warp    rows 16w .. 16w + 15 of both, which it alone copies and reads
//
//   S^T[16 keys, 8 heads] = K q^T         codes of K become the A operand in registers, q is the B operand
//   O^T[256, 8 heads] += V^T P^T          codes of V likewise; P goes from S to the B operand by `transpose`
//
// A lane reads runs of codes of the rows it has, and which element of d an operand's slot stands for follows from that: the
// query has the same order, and the result is put in order when warps merge (decode_packed_merge.cuh).
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
    static_assert(kBytes % 128 == 0);
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

/// Starts copying the warp's rows of a block into a slot.
template <class B>
__device__ __forceinline__ void start_rows(const char* block, uint32_t slot) {
    constexpr int kPieces = B::kCodes / 16, kRows = 32 / kPieces;  // of a row; of the warp's copies at once
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys, r = lane / kPieces;
    const char* from = block + first * B::kCodes + lane * 16;
    const uint32_t to = slot + first * B::kCodes + r * B::kCodes + ((lane % kPieces ^ swizzled(r)) << 4);
#pragma unroll
    for (int i = 0; i < kWarpKeys / kRows; ++i)
        copy_piece((to ^ ((i * kRows & 6) << 4)) + i * 512, from + i * 512);
    // scales, a piece a lane: a row of them for each 16 elements, eight rows of one, four of two
    const bool blocks = lane < B::kBlocks;
    const int at = blocks ? B::kBlocksAt + first * B::kBlocks + lane * 16
                          : B::kScalesAt + first * B::kScales + (lane - B::kBlocks) * 16;
    if (lane < B::kBlocks + B::kScales) copy_piece(slot + at, block + at);
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

/// q in shared memory as the B operand of S^T. Products take 64 elements at a time, four of them: lane l has head l / 4, and of the
/// keys' codes 16 that follow each other, so their first eight elements in [.][0][l] and the others in [.][1][l].
struct SharedQuery {
    uint4 pairs[kDim / 64][2][32];
};
/// Puts eight elements of a head, from 8 * eighth on, where they belong.
template <class K>
__device__ __forceinline__ void put_query(SharedQuery& q, int head, int eighth, const uint4& x) {
    // a lane's 16 codes: of fp8 a piece, of 4 bits half of one
    const int step = K::kPacking == Packing::fp8 ? eighth / 8 : eighth / 16 * 2 + eighth / 2 % 2;
    const int c = K::kPacking == Packing::fp8 ? eighth / 2 % 4 : eighth / 4 % 4;
    q.pairs[step][eighth % 2][head * 4 + c] = ordered(K::kPacking, x);
}

/// Sums of products that do not wait for each other.
using Sums = float[2][4];

/// Two products over eight elements of rows l / 4 and l / 4 + 8 as pairs.
__device__ __forceinline__ void add_eight(Sums& s, const uint32_t (&x)[4], const uint32_t (&y)[4],
                                          const uint4& q) {
    const uint32_t low[4] = {x[0], y[0], x[1], y[1]}, high[4] = {x[2], y[2], x[3], y[3]};
    mma(s[0], low, q.x, q.y);
    mma(s[1], high, q.z, q.w);
}
__device__ __forceinline__ void scale(uint32_t (&pairs)[4], uint32_t by) {
#pragma unroll
    for (uint32_t& pair : pairs) pair = packed::times(pair, by);
}

/// Products of 64 elements: `a` and `b` are the lane's 16 codes of rows l / 4 and l / 4 + 8, a_16 and b_16 their scale of 16.
template <class K>
__device__ __forceinline__ void add_keys(Sums& s, const uint32_t (&a)[K::kCodes / 64],
                                         const uint32_t (&b)[K::kCodes / 64], uint32_t a_16, uint32_t b_16,
                                         const uint4 (&q)[2]) {
    if constexpr (K::kPacking == Packing::nvfp4)
        a_16 = packed::lifted_scales(a_16 * 0x1000100u), b_16 = packed::lifted_scales(b_16 * 0x1000100u);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint32_t x[4], y[4];
        if constexpr (K::kPacking == Packing::fp8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                x[2 * i] = packed::low_e4m3(a[2 * j + i]), x[2 * i + 1] = packed::high_e4m3(a[2 * j + i]);
                y[2 * i] = packed::low_e4m3(b[2 * j + i]), y[2 * i + 1] = packed::high_e4m3(b[2 * j + i]);
            }
        } else if constexpr (K::kPacking == Packing::nvfp4) {
            packed::small_e2m1(a[j], x), packed::small_e2m1(b[j], y);
            scale(x, a_16), scale(y, b_16);
        } else {
            const packed::Table table = packed::lloyd();
            const packed::Looked a0(table, a[j]), a1(table, a[j] >> 16), b0(table, b[j]),
                b1(table, b[j] >> 16);
            x[0] = a0.first(), x[1] = a0.second(), x[2] = a1.first(), x[3] = a1.second();
            y[0] = b0.first(), y[1] = b0.second(), y[2] = b1.first(), y[3] = b1.second();
        }
        add_eight(s, x, y, q[j]);
    }
}

/// The warp's scores without scales. A loop, since instructions that have not run for a while take longer to come than to run.
template <class K>
__device__ __forceinline__ void score_products(uint32_t slot, const SharedQuery& q, Sums& s) {
    constexpr bool kBytes = K::kPacking == Packing::fp8;
    const int lane = threadIdx.x % 32, g = lane / 4, row = threadIdx.x / 32 * kWarpKeys + g;
    const uint32_t own = slot + row * K::kCodes + ((lane % 4 ^ swizzled(g)) << 4);
    const uint32_t scales = slot + K::kBlocksAt + row * K::kBlocks + lane % 4 * 2;
#pragma unroll 1
    for (int i = 0; i < kDim / 64; ++i) {
        const uint32_t at = kBytes ? (own ^ (i % 2 << 6)) + i / 2 * 128 : (own ^ (i / 2 << 6)) + i % 2 * 8;
        const uint4 pairs[2] = {q.pairs[i][0][lane], q.pairs[i][1][lane]};
        if constexpr (kBytes) {
            const uint4 x = shared_at<uint4>(at), y = shared_at<uint4>(at + 8 * K::kCodes);
            add_keys<K>(s, {x.x, x.y, x.z, x.w}, {y.x, y.y, y.z, y.w}, 0, 0, pairs);
        } else {
            const uint2 x = shared_at<uint2>(at), y = shared_at<uint2>(at + 8 * K::kCodes);
            uint32_t a_16 = 0, b_16 = 0;
            if constexpr (K::kBlocks > 0) {
                const uint32_t of = scales + i / 2 * 8 + i % 2;
                a_16 = shared_at<uint8_t>(of), b_16 = shared_at<uint8_t>(of + 8 * K::kBlocks);
            }
            add_keys<K>(s, {x.x, x.y}, {y.x, y.y}, a_16, b_16, pairs);
        }
    }
}

/// Number `which` of the scales of the warp's row r.
template <class B>
__device__ __forceinline__ float row_scale(uint32_t slot, int r, int which = 0) {
    return as_float(shared_at<uint16_t>(slot + B::kScalesAt +
                                        (threadIdx.x / 32 * kWarpKeys + r) * B::kScales + 2 * which));
}

/// Scores of the warp's 16 keys, as score() in decode_math.cuh.
template <class B>
__device__ __forceinline__ void score_packed(uint32_t slot, const SharedQuery& q, int keys_left,
                                             float (&s)[4]) {
    const int r = threadIdx.x % 32 / 4;
    Sums parts = {};
    score_products<B>(slot, q, parts);
    const float lift = score_scale(kDim) * lift_of_scores(B::kPacking);
    const float scales[2] = {row_scale<B>(slot, r) * lift, row_scale<B>(slot, r + 8) * lift};
#pragma unroll
    for (int e = 0; e < 4; ++e)
        s[e] = r + e / 2 * 8 < keys_left ? (parts[0][e] + parts[1][e]) * scales[e / 2] : -INFINITY;
}

/// The warp's running result, of heads 2(l%4) + {0, 1}: values, not yet divided by the sum, of the elements that element() says
/// (decode_packed_merge.cuh); what exponents are relative to; the lane's own addends of the sum, and of what all elements have in
/// common (`steps`).
struct WarpPart {
    float o[kDim / 16][4];
    float ceiling[2], sum[2], middle[2];
};
__device__ __forceinline__ void clear(WarpPart& part) {
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) part.o[j][e] = 0;
    part.ceiling[0] = part.ceiling[1] = -INFINITY;
    part.sum[0] = part.sum[1] = part.middle[0] = part.middle[1] = 0;
}

/// A score above its head's ceiling raises that to this much above the highest score, so that it seldom happens again.
constexpr float kRoom = 8;

__device__ __forceinline__ void raise_ceilings(const float (&s)[4], WarpPart& part) {
    const bool above = fmaxf(s[0], s[2]) > part.ceiling[0] || fmaxf(s[1], s[3]) > part.ceiling[1];
    if (!__any_sync(0xffffffffu, above)) return;
    const bool first = __all_sync(0xffffffffu, fmaxf(part.ceiling[0], part.ceiling[1]) == -INFINITY);
    float f[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float highest = over_keys_max(fmaxf(s[h], s[h + 2])), before = part.ceiling[h];
        part.ceiling[h] = highest > before ? highest + kRoom : before;
        f[h] = part_weight(before, part.ceiling[h]);
    }
    if (first) return;  // nothing to rescale
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        part.sum[h] *= f[h], part.middle[h] *= f[h];
#pragma unroll
        for (int j = 0; j < kDim / 16; ++j) part.o[j][h] *= f[h], part.o[j][h + 2] *= f[h];
    }
}

/// Scores become probabilities times their values' scales, as the B operand. Values in equal steps have a middle beside the scale,
/// the same for all elements of a row: sums of these are apart (WarpPart::middle).
template <class B>
__device__ __forceinline__ void weigh(uint32_t slot, int keys_left, float (&s)[4], WarpPart& part,
                                      uint32_t (&p)[2]) {
    const float lift = lift_of_values(B::kPacking);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = threadIdx.x % 32 / 4 + 8 * half;
        const bool there = r < keys_left;  // what lies beyond may be NaN
        const float scale = there ? row_scale<B>(slot, r) * lift : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float& x = s[2 * half + h];
            x = fast_exp2(x - part.ceiling[h]);
            part.sum[h] += x;
            if constexpr (B::kPacking == Packing::steps) {
                const float middle = there ? row_scale<B>(slot, r, 1) : 0.0f;
                part.middle[h] = fmaf(x, middle, part.middle[h]);
            }
            x *= scale;
        }
    }
    p[0] = transpose(pack_bf16(s[0], s[1])), p[1] = transpose(pack_bf16(s[2], s[3]));
}

/// One product: elements of row l / 4 and of row l / 4 + 8 of the result, as pairs of V's rows 2(l%4) and the next, and eight on.
__device__ __forceinline__ void add_product(WarpPart& part, int j, const uint32_t (&x)[4],
                                            const uint32_t (&y)[4], int pair, const uint32_t (&p)[2]) {
    const uint32_t a[4] = {x[pair], x[pair + 1], y[pair], y[pair + 1]};
    mma(part.o[j], a, p[0], p[1]);
}

/// Words of 16 bits of V's rows in pairs, two rows' in each register: of two pieces that follow each other rows 2(l%4), + 1 and
/// + 8, + 9 of the first, then of the second piece; word l / 4 of each.
template <class B>
__device__ __forceinline__ void load_pairs(uint32_t slot, int two_pieces, uint32_t (&v)[4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t own = slot + (threadIdx.x / 32 * kWarpKeys + lane % 16) * B::kCodes +
                         ((lane / 16 ^ swizzled(lane % 8)) << 4);
    load_matrices_transposed(v, (own ^ ((2 * two_pieces & 6) << 4)) + two_pieces / 4 * 128);
}

__device__ __forceinline__ void add_fp8(uint32_t slot, const uint32_t (&p)[2], WarpPart& part) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
        uint32_t v[4];
        load_pairs<BlockOf<Packing::fp8>>(slot, i, v);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t a[4] = {packed::low_e4m3(v[2 * h]), packed::high_e4m3(v[2 * h]),
                                   packed::low_e4m3(v[2 * h + 1]), packed::high_e4m3(v[2 * h + 1])};
            mma(part.o[2 * i + h], a, p[0], p[1]);
        }
    }
}

__device__ __forceinline__ void add_steps(uint32_t slot, const uint32_t (&p)[2], WarpPart& part) {
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) {
        uint32_t v[4];
        load_pairs<BlockOf<Packing::steps>>(slot, i, v);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t x[4], y[4];
            packed::steps_of(v[2 * h], x), packed::steps_of(v[2 * h + 1], y);
            add_product(part, 4 * i + 2 * h, x, y, 0, p);
            add_product(part, 4 * i + 2 * h + 1, x, y, 2, p);
        }
    }
}

/// Scales of 16 of V's rows 2(l%4), + 1 in the first register, + 8, + 9 in the other: of elements 32(l/4) and 16 more.
__device__ __forceinline__ void load_scales(uint32_t blocks, uint32_t (&v)[2]) {
    const uint32_t own = blocks + (threadIdx.x / 32 * kWarpKeys + threadIdx.x % 16) * (kDim / kv::kBlock);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "r"(own));
}

/// A lane has piece l / 4 of V's rows, two blocks of 16, since scales take more instructions than pairs.
__device__ __forceinline__ void add_nvfp4(uint32_t slot, const uint32_t (&p)[2], WarpPart& part) {
    using B = BlockOf<Packing::nvfp4>;
    const int lane = threadIdx.x % 32, r = lane % 4 * 2;
    const uint32_t own =
        slot + (threadIdx.x / 32 * kWarpKeys + r) * B::kCodes + ((lane / 4 ^ swizzled(r)) << 4);
    uint4 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        rows[i] = shared_at<uint4>((own ^ (i % 2 * 5 << 4)) + (i / 2 * 8 + i % 2) * B::kCodes);
    uint32_t scales[2];
    load_scales(slot + B::kBlocksAt, scales);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const auto word = [&](int i) {
            return w == 0 ? rows[i].x : w == 1 ? rows[i].y : w == 2 ? rows[i].z : rows[i].w;
        };
        const uint32_t by[2] = {packed::lifted_scales(w < 2 ? scales[0] << 8 : scales[0]),
                                packed::lifted_scales(w < 2 ? scales[1] << 8 : scales[1])};
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // four elements
            uint32_t x[4], y[4];
            packed::small_e2m1(__byte_perm(word(0), word(1), h == 0 ? 0x5410 : 0x7632), x);
            packed::small_e2m1(__byte_perm(word(2), word(3), h == 0 ? 0x5410 : 0x7632), y);
            scale(x, by[0]), scale(y, by[1]);
            add_product(part, 4 * w + 2 * h, x, y, 0, p);
            add_product(part, 4 * w + 2 * h + 1, x, y, 2, p);
        }
    }
}

/// part += V^T P^T of the warp's 16 keys, of which s are the scores.
template <class B>
__device__ __forceinline__ void add_values(uint32_t slot, int keys_left, float (&s)[4], WarpPart& part) {
    uint32_t p[2];
    raise_ceilings(s, part);
    weigh<B>(slot, keys_left, s, part, p);
    if constexpr (B::kPacking == Packing::fp8)
        add_fp8(slot, p, part);
    else if constexpr (B::kPacking == Packing::nvfp4)
        add_nvfp4(slot, p, part);
    else
        add_steps(slot, p, part);
}

}  // namespace quern::cuda::attention::decode
