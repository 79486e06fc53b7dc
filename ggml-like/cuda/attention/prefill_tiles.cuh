// Attention of prompt rows: a block's tile of query rows, and the copies of q, gates, K and V into shared memory.
#pragma once

#include "ggml-like/cuda/attention/attention.cuh"

namespace quern::cuda::attention::prefill {

using namespace ptx;

constexpr int kDim = 256, kSteps = kDim / 16;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = kTileM;
constexpr int kKeys = 32, kStages = 3;
constexpr int kTileBytes = kKeys * kDim * 2, kStageBytes = 2 * kTileBytes;
constexpr int kSharedBytes = kStages * kStageBytes, kHeldSharedBytes = kSharedBytes + kHeldBytes;
static_assert(kRows == 16 * kWarps && kRows * kDim * 2 <= 2 * kStageBytes);
static_assert(kSharedBytes <= 99 * 1024 && kHeldSharedBytes <= 227 * 1024);
constexpr int kSegmentSteps = kSegmentKeys / kKeys;
constexpr int kElements = kRows * kDim / 4;  // of a tile's sums, four floats each
constexpr float kSlack =
    8;  // scores may exceed the maximum by this, as powers of 2, before sums are rescaled
constexpr float kNoScore = -1e30f;  // below any score: the maximum of no keys

/// A block's query rows, all of one sequence, and its KV head.
struct Tile {
    int first, rows, sequence, kv_head;
};

/// Tile `index` of the rows whose y is wanted, counted from the end of the batch, so that of a sequence the rows with the most keys
/// come first. False: there are fewer tiles.
__device__ __forceinline__ bool find_tile(const AttentionCall& c, int index, int tile_rows, Tile& tile) {
    for (int s = c.sequences - 1; s >= 0; --s) {
        const int begin = c.from[s], end = c.start[s + 1], tiles = (end - begin + tile_rows - 1) / tile_rows;
        if (index < tiles) {
            tile.first = begin + (tiles - 1 - index) * tile_rows;
            tile.rows = min(tile_rows, end - tile.first);
            tile.sequence = s;
            return true;
        }
        index -= tiles;
    }
    return false;
}

/// Starts copying the 32 keys and values of a step; 16-byte piece p of row r lies at p ^ (r % 8). Keys from `keys` on
/// become zeros.
__device__ __forceinline__ void start_tile(const AttentionCall& c, const Tile& tile, int page, int step,
                                           int keys, char* stage) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int key = step * kKeys + warp;
    const int64_t place =
        ((static_cast<int64_t>(page) * c.kv_heads + tile.kv_head) * kKeysPerPage + key % kKeysPerPage) *
            kDim +
        lane * 8;
    char* to = stage + warp * kDim * 2 + ((lane ^ warp) << 4);
#pragma unroll
    for (int i = 0; i < kKeys / kWarps; ++i) {
        const bool valid = key + i * kWarps < keys;
        copy_async16(to + i * kWarps * kDim * 2, c.k_cache + place + i * kWarps * kDim, valid);
        copy_async16(to + kTileBytes + i * kWarps * kDim * 2, c.v_cache + place + i * kWarps * kDim, valid);
    }
}

/// The 16 rows of M of a warp; lanes r and r + 16 know row r.
struct WarpRows {
    int row, head;
    bool own;  // false: beyond the tile, a copy of another row
};

__device__ __forceinline__ WarpRows warp_rows(const AttentionCall& c, const Tile& tile, int thread) {
    const int group = quotient(c.heads, c.kv_heads), m = thread / 32 * 16 + thread % 16;
    const int row = quotient(m, group);
    return {tile.first + min(row, tile.rows - 1), tile.kv_head * group + m - row * group, row < tile.rows};
}

/// Starts copying the warp's rows of q or of the gate, 512 bytes each.
__device__ __forceinline__ void start_rows(const HeadRows& from, const WarpRows& rows, int lane, char* to) {
#pragma unroll
    for (int r = 0; r < 16; ++r) {
        const int row = __shfl_sync(0xffffffffu, rows.row, r), head = __shfl_sync(0xffffffffu, rows.head, r);
        copy_async16(to + r * kDim * 2 + ((lane ^ (r & 7)) << 4), from.at(row, head) + lane * 8);
    }
}

/// The warp's rows of q as A operands.
__device__ __forceinline__ void load_queries(uint32_t rows, int lane, uint32_t (&q)[kSteps][4]) {
    const uint32_t base = rows + lane % 16 * kDim * 2 + ((lane / 16 ^ (lane & 7)) << 4);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) load_matrices(q[s], (base ^ ((2 * s & 7) << 4)) + (s >> 2) * 128);
}

}  // namespace quern::cuda::attention::prefill
