// Attention of answer rows: which keys a block has, and how they come into its ring in shared memory.
//
//   keys of a row   | old: in the cache before the step | fresh: of this step, copied raw from the inputs |
//   tiles of 64     |    0    |    1    |    2    | ...
//   chunks          a chunk has 8 * each tiles, block b of its cluster the b-th run of `each` tiles
//   ring            slot (2n) % 3 takes K of the block's tile n, slot (2n + 1) % 3 its V
#pragma once

#include "ggml-like/cuda/attention/attention.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

constexpr int kDim = 256, kHeads = 8;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileKeys = kKeysPerPage, kWarpKeys = kTileKeys / kWarps, kWarpDims = kDim / kWarps;
constexpr int kRowBytes = kDim * 2, kSlotBytes = kTileKeys * kRowBytes, kRing = 3;
static_assert(kWarpKeys == 16 && kWarpDims == 64);

/// What warps leave for each other.
struct Exchange {
    char p[kHeads * kTileKeys * 2];      // probabilities [head][key], BF16
    float2 highest[kWarps][kHeads / 2];  // of each warp's scores, heads in pairs
    float2 sums[kWarps][kHeads / 2];
    float2 totals[kHeads];  // the block's maximum and sum
};
/// Shared memory. Slot 2 first takes q, at the end the block's result, in which head h's values begin at h * kOutRow.
struct Shared {
    char ring[kRing][kSlotBytes];
    Exchange exchange;
};
constexpr int kSpare = 2, kOutRow = kDim + 4;  // the pad spreads heads over the banks
constexpr int kQueryRows = 8;                  // rows of slot 2 that q takes
static_assert(sizeof(Shared) <= 99 * 1024 && kHeads * kOutRow * 4 <= kSlotBytes);

/// A block's row, or what its rows have in common (decode_rows.cu). Keys from `fresh` on are of this step, and not in the cache
/// yet.
struct Row {
    int t, kv_head;
    int group;             // query heads of the KV head
    int keys;              // that the row sees, its own the last
    int fresh, fresh_row;  // the first fresh key; its row of the step
    const int* pages;
    int64_t own_place;  // of the row's own key in the caches
    int shift = 0;      // from a fresh key's position to what it rotates by
};

__device__ __forceinline__ int page_of(const Row& row, int tile) {
    return row.pages[min(tile, (row.keys - 1) / kTileKeys)];
}

/// A block's tiles: a run of `each` in every chunk of its cluster.
struct Share {
    int each, stride;                   // tiles of a run; tiles from the end of a run to the next
    int tiles;                          // of the row
    int tile, left;                     // the current tile, tiles left of its run
    int ahead, ahead_left, ahead_page;  // the same of the tile after it
};

__device__ __forceinline__ void step_tile(const Share& share, int& tile, int& left) {
    ++tile;
    if (--left > 0) return;
    tile += share.stride;
    left = share.each;
}

__device__ __forceinline__ Share share_of(const Row& row, int chunk, int chunks, int clusters) {
    Share share;
    share.tiles = (row.keys + kTileKeys - 1) / kTileKeys;
    share.each = (share.tiles + chunks * kSplitBlocks - 1) / (chunks * kSplitBlocks);
    share.stride = (clusters * kSplitBlocks - 1) * share.each;
    share.tile = share.ahead =
        (chunk * kSplitBlocks + static_cast<int>(blockIdx.x) % kSplitBlocks) * share.each;
    share.left = share.ahead_left = share.each;
    step_tile(share, share.ahead, share.ahead_left);
    share.ahead_page = page_of(row, share.ahead);
    return share;
}

__device__ __forceinline__ int64_t cache_place(const AttentionCall& c, const Row& row, int page, int key) {
    return ((static_cast<int64_t>(page) * c.kv_heads + row.kv_head) * kKeysPerPage + key % kKeysPerPage) *
           kDim;
}

/// The place of 16-byte piece `piece` of row r of a tile: the same piece of eight rows lies in different banks.
__device__ __forceinline__ int piece_at(int r, int piece) { return r * kRowBytes + ((piece ^ (r & 7)) << 4); }

__device__ __forceinline__ char* slot_of(Shared& shared, int item) { return shared.ring[item % kRing]; }

/// Starts copying rows begin .. end-1 of the warp's 16 of a tile of K or V. Leaves out fresh keys; rows past the last
/// key become zeros.
__device__ __forceinline__ void start_old(const AttentionCall& c, const Row& row, int tile, int page,
                                          bool values, char* slot, int begin, int end) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;
    const int key = tile * kTileKeys + first;
    if (tile * kTileKeys >= row.keys) return;
    const bf16* from = (values ? c.v_cache : c.k_cache) + cache_place(c, row, page, key) + lane * 8;
    char* to = slot + first * kRowBytes;
    if (key + kWarpKeys <= row.fresh && end - begin == kWarpKeys) {
#pragma unroll
        for (int r = 0; r < kWarpKeys; ++r) copy_async16(to + piece_at(r, lane), from + r * kDim);
    } else {
#pragma unroll 1
        for (int r = begin; r < end; ++r)
            if (key + r < row.fresh || key + r >= row.keys)
                copy_async16(to + piece_at(r, lane), from + r * kDim, key + r < row.fresh);
    }
}

/// Starts copying the warp's fresh keys or values of a tile, not yet normed, from the inputs.
__device__ __forceinline__ void start_fresh(const AttentionCall& c, const Row& row, int tile, bool values,
                                            char* slot) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;
    const int key = tile * kTileKeys + first;
    const HeadRows& from = values ? c.v : c.k;
#pragma unroll 1
    for (int r = max(0, row.fresh - key); r < min(kWarpKeys, row.keys - key); ++r)
        copy_async16(slot + first * kRowBytes + piece_at(r, lane),
                     from.at(row.fresh_row + key + r - row.fresh, row.kv_head) + lane * 8);
}

/// Both, for the warp's 16 rows of the tile ahead; closes the group of copies.
__device__ __forceinline__ void start_ahead(const AttentionCall& c, const Row& row, const Share& share,
                                            bool values, char* slot) {
    start_old(c, row, share.ahead, share.ahead_page, values, slot, 0, kWarpKeys);
    start_fresh(c, row, share.ahead, values, slot);
    commit_copies();
}

}  // namespace quern::cuda::attention::decode
