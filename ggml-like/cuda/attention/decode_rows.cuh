// Attention of several answer rows of a sequence: which rows share a block, and the work of two warps for some of them.
//
//   group of rows   up to 2 kOwn neighbours of a sequence; they share what is read if their chunks have the same tiles
//   two warps       kOwn of the group's rows: S^T[32 keys, 8 heads] = K q^T each, then O^T[128, 8 heads] += V^T P^T each; what
//                   they have read of K or V serves all of their rows
//
// Each step is that of decode_math.cuh for the same 16 keys (a slice) or the same elements, in the same order: the same bits, if
// values are finite.
#pragma once

#include "ggml-like/cuda/attention/decode_math.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

constexpr int kPair = 2, kPairs = kWarps / kPair;  // warps that share rows; such pairs of a block
constexpr int kSlices = kTileKeys / 16, kPairSlices = kSlices / kPair, kPairDims = kDim / kPair;
/// Rows at earlier positions do not share: there a block for each is faster (H200, 4 rows and 8).
template <int kOwn>
constexpr int kSharedFrom = (kOwn == 1 ? 3 : 2) * kChunkKeys;

/// What the two warps of a row leave for each other.
struct RowExchange {
    char p[kHeads * kTileKeys * 2];     // probabilities [head][key], BF16
    float2 highest[kPair][kHeads / 2];  // of each warp's scores, heads in pairs
    float2 sums[kSlices][kHeads / 2];
};
template <int kOwn>
struct RowsShared {
    char ring[kRing][kSlotBytes];
    RowExchange rows[kPairs * kOwn];
};

/// A barrier of the two warps that share rows.
__device__ __forceinline__ void meet_pair() {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / (32 * kPair)) : "memory");
}

/// Rows t .. t + count - 1 of a sequence, from `position` on; none if count is 0.
struct RowGroup {
    int sequence, t, count, position;

    /// Whether all of its rows have the same tiles in their chunks. They have not where one of them begins another chunk, or makes
    /// the run of every block a tile longer.
    __device__ __forceinline__ bool alike() const {
        const int chunks = min(position / kChunkKeys + 1, kMaxChunks), last = position + count - 1;
        const int run = chunks * kSplitBlocks * kTileKeys;
        const bool same_chunks = min(last / kChunkKeys + 1, kMaxChunks) == chunks;
        return same_chunks && quotient(position, run) == quotient(last, run);
    }
};

template <int kRows>
constexpr __host__ __device__ int groups_of(int rows) {
    return (rows + kRows - 1) / kRows;
}

/// Group `index` of the rows of a sequence, of which row t is the first.
template <int kRows>
__device__ __forceinline__ RowGroup group_of(const AttentionCall& c, int sequence, int t, int rows,
                                             int index) {
    const int skipped = index * kRows;
    return {sequence, t + skipped, min(kRows, rows - skipped), c.positions[t] + skipped};
}

/// Group `index` of the step, counted over its sequences: a lane a sequence. The same in all lanes.
template <int kRows>
__device__ __forceinline__ RowGroup find_group(const AttentionCall& c, int index) {
    if (c.sequences == 1) {
        const int t = c.start[0], rows = c.start[1] - t;
        return index * kRows < rows ? group_of<kRows>(c, 0, t, rows, index) : RowGroup{};
    }
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < c.sequences; first += 32) {
        const int s = first + lane;
        const int t = s < c.sequences ? c.start[s] : 0, rows = s < c.sequences ? c.start[s + 1] - t : 0;
        const int groups = groups_of<kRows>(rows);
        int end = groups;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, d);
            if (lane >= d) end += other;
        }
        const int own = index - (end - groups);
        const unsigned owner = __ballot_sync(0xffffffffu, own >= 0 && own < groups);
        if (owner != 0) {
            const int from = __ffs(static_cast<int>(owner)) - 1;
            const auto of = [&](int x) { return __shfl_sync(0xffffffffu, x, from); };
            return group_of<kRows>(c, first + from, of(t), of(rows), of(own));
        }
        index -= __shfl_sync(0xffffffffu, end, 31);
    }
    return {};
}

/// cos and sin at a position.
__device__ __forceinline__ Rotations rotations_at(const AttentionCall& c, int position) {
    const int lane = threadIdx.x % 32;
    Angles angles;
#pragma unroll
    for (int i = 0; i < 8; ++i) angles.turns[i] = c.turns[lane % 4 * 8 + i];
    return {angles, position, lane};
}

/// A group's rows of the thread's pair of warps: rows `first`, `first` + kPairs, ..., `count` of them.
struct OwnRows {
    int first, count;

    __device__ __forceinline__ explicit OwnRows(int rows)
        : first(static_cast<int>(threadIdx.x) / (32 * kPair)), count((rows - first + kPairs - 1) / kPairs) {}
    __device__ __forceinline__ int at(int i) const { return first + i * kPairs; }
};

/// The pair's rows of q: each warp norms and rotates half of their heads, which go to 8 rows of `slot` for each row. Barriers of
/// the block are inside, the second after all have read theirs.
template <int kOwn>
__device__ __forceinline__ void load_queries(const AttentionCall& c, const Row& row, const OwnRows& own,
                                             int position, const float (&q_norm)[8], char* slot,
                                             Query (&q)[kOwn]) {
    constexpr int kOwnHeads = kHeads / kPair;
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % kPair * kOwnHeads;
    const auto at = [&](int i, int h) {
        return reinterpret_cast<uint4*>(slot + piece_at(own.at(i) * kHeads + head + h, lane));
    };
    uint4 raw[kOwn][kOwnHeads];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int h = 0; h < kOwnHeads; ++h)
            raw[i][h] = *reinterpret_cast<const uint4*>(
                c.q.at(row.t + (i < own.count ? own.at(i) : 0),
                       row.kv_head * row.group + min(head + h, row.group - 1)) +
                lane * 8);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        if (i >= own.count) break;
        const Rotations rotations = rotations_at(c, position + own.at(i) + row.shift);
#pragma unroll
        for (int h = 0; h < kOwnHeads; ++h) *at(i, h) = norm_rope(c, raw[i][h], q_norm, rotations, lane);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int s = 0; s < kDim / 16; s += 2) {
            uint32_t b[4];
            load_matrices(b,
                          shared_address(slot + piece_at(own.at(i) * kHeads + lane % 8, 2 * s + lane / 8)));
            q[i].b[s][0] = b[0], q[i].b[s][1] = b[1], q[i].b[s + 1][0] = b[2], q[i].b[s + 1][1] = b[3];
        }
    __syncthreads();
}

/// The group's fresh keys of a tile, in turns over the block's warps: norms and rotates keys in their slot; those of the
/// group's own rows, from position own_from on, also go to the cache, as do their values.
__device__ __forceinline__ void finish_group(const AttentionCall& c, const Row& row, int own_from,
                                             const float (&k_norm)[8], int tile, bool values, char* slot) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, begin = tile * kTileKeys;
    const int end = min(begin + kTileKeys, row.keys);
#pragma unroll 1
    for (int key = max(begin, values ? own_from : row.fresh) + warp; key < end; key += kWarps) {
        uint4* at = reinterpret_cast<uint4*>(slot + piece_at(key - begin, lane));
        uint4 x = *at;
        if (!values) *at = x = norm_rope(c, x, k_norm, rotations_at(c, key + row.shift), lane);
        if (key >= own_from)
            *reinterpret_cast<uint4*>((values ? c.v_cache : c.k_cache) +
                                      cache_place(c, row, page_of(row, tile), key) + lane * 8) = x;
    }
}

/// The running result of a row. Lane l of the pair's warp w holds of heads 2(l%4) + {0, 1}: in o[j] elements 128w + 16j + l/4
/// (+ 8), the maximum over all keys so far, and its addends of the sums over each of its slices.
struct RowPart {
    float o[kPairDims / 16][4];
    float maximum[2], sum[kPairSlices][2];
};

__device__ __forceinline__ void clear(RowPart& part) {
#pragma unroll
    for (int j = 0; j < kPairDims / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) part.o[j][e] = 0;
#pragma unroll
    for (int i = 0; i < kPairSlices; ++i) part.sum[i][0] = part.sum[i][1] = 0;
    part.maximum[0] = part.maximum[1] = -INFINITY;
}

template <int kOwn>
using Scores = float[kOwn][kPairSlices][4];

/// Scores of the warp's slices for the pair's rows, of which row i sees keys_left + i * kPairs keys of the tile; their maxima go
/// to shared memory.
template <int kOwn>
__device__ __forceinline__ void score_rows(const char* tile, const Query (&q)[kOwn], int keys_left,
                                           const OwnRows& own, RowExchange* shared, Scores<kOwn>& s) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % kPair;
    const float scale = score_scale(kDim);
#pragma unroll
    for (int j = 0; j < kPairSlices; ++j) {
        const int first = (half * kPairSlices + j) * 16;
        float parts[kOwn][4][4] = {};
        const uint32_t base = shared_address(tile + first * kRowBytes + piece_at(lane % 16, lane / 16));
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            uint32_t a[4];
            load_matrices(a, (base ^ ((2 * k & 7) << 4)) + (k >> 2) * 128);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) mma(parts[i][k % 4], a, q[i].b[k][0], q[i].b[k][1]);
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float sum = (parts[i][0][e] + parts[i][1][e]) + (parts[i][2][e] + parts[i][3][e]);
                const int left = keys_left + i * kPairs - first;
                s[i][j][e] = lane / 4 + e / 2 * 8 < left ? sum * scale : -INFINITY;
            }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        float2 highest{-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < kPairSlices; ++j) {
            highest.x = fmaxf(highest.x, fmaxf(s[i][j][0], s[i][j][2]));
            highest.y = fmaxf(highest.y, fmaxf(s[i][j][1], s[i][j][3]));
        }
        highest = {over_keys_max(highest.x), over_keys_max(highest.y)};
        if (lane < kHeads / 2) shared[own.at(i)].highest[half][lane] = highest;
    }
}

/// Raises a row's maximum to that of both warps' scores, rescales the sums, and leaves probabilities in shared memory; of a row
/// that does not see the tile zeros.
__device__ __forceinline__ void probabilities(float (&s)[kPairSlices][4], bool sees, RowExchange& shared,
                                              RowPart& part) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % kPair, head = lane / 4;
    char* to = shared.p + head * kTileKeys * 2 + lane % 4 * 4;
    const auto store = [&](int piece, uint32_t p) {
        *reinterpret_cast<uint32_t*>(to + ((2 * kPairSlices * half + piece ^ head) << 4)) = p;
    };
    if (!sees) {
#pragma unroll
        for (int piece = 0; piece < 2 * kPairSlices; ++piece) store(piece, 0);
        return;
    }
    float now[2] = {part.maximum[0], part.maximum[1]};
#pragma unroll
    for (int w = 0; w < kPair; ++w) {
        const float2 other = shared.highest[w][lane % 4];
        now[0] = fmaxf(now[0], other.x), now[1] = fmaxf(now[1], other.y);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float f = fast_exp2(part.maximum[h] - now[h]);
        part.maximum[h] = now[h];
#pragma unroll
        for (int j = 0; j < kPairSlices; ++j) part.sum[j][h] *= f;
#pragma unroll
        for (int j = 0; j < kPairDims / 16; ++j) part.o[j][h] *= f, part.o[j][h + 2] *= f;
    }
#pragma unroll
    for (int j = 0; j < kPairSlices; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[j][e] = fast_exp2(s[j][e] - part.maximum[e % 2]);
            part.sum[j][e % 2] += s[j][e];
        }
        store(2 * j, transpose(pack_bf16(s[j][0], s[j][1])));
        store(2 * j + 1, transpose(pack_bf16(s[j][2], s[j][3])));
    }
}

/// part[i].o += V^T P^T of a tile.
template <int kOwn>
__device__ __forceinline__ void add_values(const char* tile, const OwnRows& own, const RowExchange* shared,
                                           RowPart (&part)[kOwn]) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % kPair;
    uint32_t p[kOwn][kSlices][2];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < kSlices; j += 2) {
            const char* from = shared[own.at(i)].p + lane % 8 * kTileKeys * 2;
            uint32_t b[4];
            load_matrices(b, shared_address(from + ((2 * j + lane / 8 ^ lane % 8) << 4)));
            p[i][j][0] = b[0], p[i][j][1] = b[1], p[i][j + 1][0] = b[2], p[i][j + 1][1] = b[3];
        }
    const uint32_t base =
        shared_address(tile + piece_at(lane % 8 + lane / 16 * 8, lane / 8 & 1)) + half * kPairDims * 2;
#pragma unroll
    for (int k = 0; k < kSlices; ++k)
#pragma unroll
        for (int j = 0; j < kPairDims / 16; ++j) {
            uint32_t v[4];
            load_matrices_transposed(v, (base ^ ((2 * j & 7) << 4)) + (j >> 2) * 128 + k * 16 * kRowBytes);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) mma(part[i].o[j], v, p[i][k][0], p[i][k][1]);
        }
}

/// Stores a row: head h at values + h * row_floats, its maximum and sum at totals + h.
__device__ __forceinline__ void leave_row(const RowPart& part, RowExchange& shared, float* values,
                                          int row_floats, float2* totals) {
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % kPair, head = 2 * (lane % 4);
    meet_pair();  // the last chunk's sums have been read
#pragma unroll
    for (int j = 0; j < kPairSlices; ++j) {
        const float2 own{over_keys_sum(part.sum[j][0]), over_keys_sum(part.sum[j][1])};
        if (lane < kHeads / 2) shared.sums[half * kPairSlices + j][lane] = own;
    }
    meet_pair();
    if (half == 0 && lane < kHeads / 2) {
        float2 sum{0, 0};
#pragma unroll
        for (int j = 0; j < kSlices; ++j) sum.x += shared.sums[j][lane].x, sum.y += shared.sums[j][lane].y;
        totals[head] = {part.maximum[0], sum.x};
        totals[head + 1] = {part.maximum[1], sum.y};
    }
    float* to = values + head * row_floats + half * kPairDims + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < kPairDims / 16; ++j) {
            to[h * row_floats + 16 * j] = part.o[j][h];
            to[h * row_floats + 16 * j + 8] = part.o[j][h + 2];
        }
}

}  // namespace quern::cuda::attention::decode
