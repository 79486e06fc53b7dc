// How attention splits the keys of a row among blocks, and the work space that takes. Plain C++, since the planner
// sizes it in builds without CUDA, too.
//
//   answer rows   a chunk for each 1,024 keys begun, at most 7; of packed caches at most 21, in fp8 one for each 2,048. A cluster of
//                 8 blocks computes a chunk
//   prompt rows   segments of 2,048 keys, whose results are added in order
//
// Both depend on the row's position alone, so a row has the same bits whatever rows are beside it.
#pragma once

#include <cstdint>

namespace quern::cuda::attention {

inline constexpr int kSplitHeadDim = 256;  // the only size that is split: others take the generic kernel
inline constexpr int kSplitRotaryDims = 64, kSplitGroup = 8;  // likewise; query heads of a KV head, at most

inline constexpr int kSplitBlocks = 8;  // blocks of a cluster, which share a chunk
/// Chunks of one row and KV head. 132 SMs hold 14 such clusters at once, 7 for each of two KV heads.
inline constexpr int kMaxChunks = 7;
/// Likewise of packed caches, whose blocks run three an SM. (22 would fit, but do not always.)
inline constexpr int kMaxPackedChunks = 3 * kMaxChunks;
inline constexpr int kChunkKeys = 1024;  // a row of fewer keys has one chunk (in fp8 of twice as many)
inline constexpr int kArrivals = 4096;   // counters of answer rows: 8 for each row and KV head

/// Floats of a block's result: values of 8 heads of 256 elements, then maximum and sum of each head.
inline constexpr int kPartFloats = 8 * 256 + 8 * 2;

/// Answer rows of a step, at most.
constexpr int64_t max_answer_rows(int64_t kv_heads) { return kArrivals / (kSplitBlocks * kv_heads); }

inline constexpr int kTileM = 128;         // of a block: rows of a prompt times query heads of a KV head
inline constexpr int kSegmentKeys = 2048;  // of a prompt's keys
/// Bytes of a tile's sums over some keys, then maximum and sum of each row, twice.
inline constexpr int64_t kHeldBytes = kTileM * (256 + 4) * 4;
inline constexpr int kSharingBlocks = 144;  // blocks that share tiles, and so wait for each other, at most
inline constexpr int kHeldSlots = kSharingBlocks * 3 / 2;  // one each, and one for each tile that is shared

/// Shared memory of a block of prefill_warpgroups.cu: up to a multiple of 1,024; q; five of K or V of a page.
inline constexpr int kWarpgroupShared = 1024 + kTileM * 512 + 5 * 64 * 512;
/// Of packed caches four, and so many bytes of half pages as they are packed, of 258 bytes a row at most.
inline constexpr int kUnitsBytes = 4 * 32 * 258;
inline constexpr int kPackedWarpgroupShared = 1024 + kTileM * 512 + 4 * 64 * 512 + kUnitsBytes;
static_assert(kPackedWarpgroupShared <= 226 * 1024);

/// A prompt step over packed caches has room to unpack keys and values of so many heads for each of its rows, as many bytes as
/// its experts' rows take later: 16 tokens with two KV heads, 8 with four. Rows after more tokens than that meet them packed, and
/// so do those of a short step, whose few tiles do not expand a page often enough.
inline constexpr int64_t kUnpackedHeads = 32, kUnpackingRows = 256;
/// Pages of one KV head's keys, and as many of its values.
constexpr int64_t unpacked_pages(int64_t tokens, int64_t kv_heads) {
    return tokens < kUnpackingRows ? 0 : tokens * kUnpackedHeads / kv_heads / 64;
}
constexpr int64_t unpacked_bytes(int64_t tokens, int64_t kv_heads) {
    return 2 * unpacked_pages(tokens, kv_heads) * kv_heads * 64 * kSplitHeadDim * 2;
}

/// An upper bound of a prompt step's tiles for one KV head, of so many rows whose y is wanted.
constexpr int64_t prompt_tiles(int64_t wanted, int64_t sequences, int64_t group) {
    const int64_t rows = kTileM / group, filled = sequences < wanted ? sequences : wanted;
    return (wanted - filled) / rows + filled;
}

}  // namespace quern::cuda::attention
