// How attention cuts the keys of a row, and the work space that takes. Plain C++: it is sized where no CUDA
// is.
//
// Answer rows: chunks of keys, a cluster of blocks each. Prompt rows: segments of keys, whose results are
// added in order. Both cuts depend on the row's position alone.
#pragma once

#include <cstdint>

namespace quern::cuda::attention {

inline constexpr int kSplitHeadDim = 256;  // the only size that is cut: others take the plain kernel

inline constexpr int kSplitBlocks = 8;  // blocks that share a chunk of keys: one cluster
/// Chunks of one row and KV head: 14 clusters are what 132 multiprocessors hold.
inline constexpr int kMaxChunks = 7;
inline constexpr int kChunkKeys = 1024;  // a row of fewer keys has one chunk
inline constexpr int kArrivals = 4096;   // counters the kernel may use: 8 for each row and KV head

/// A block's result: sums of 8 heads of 256 elements, then maximum and sum of each head, in floats.
inline constexpr int kPartFloats = 8 * 256 + 8 * 2;

/// Most answer rows of a step.
constexpr int64_t max_answer_rows(int64_t kv_heads) { return kArrivals / (kSplitBlocks * kv_heads); }

inline constexpr int kTileM = 128;         // rows of a prompt times query heads of a KV head, one block
inline constexpr int kSegmentKeys = 2048;  // of a prompt's keys
/// A tile's sums over some keys; then maximum and sum of each row, twice.
inline constexpr int64_t kHeldBytes = kTileM * (256 + 4) * 4;
inline constexpr int kSharingBlocks = 144;  // most blocks that share tiles, and so wait for each other
inline constexpr int kHeldSlots = kSharingBlocks * 3 / 2;  // one each, and one for each tile

/// At least the tiles of a prompt step, for each KV head.
constexpr int64_t prompt_tiles(int64_t tokens, int64_t sequences, int64_t group) {
    const int64_t rows = kTileM / group, filled = sequences < tokens ? sequences : tokens;
    return (tokens - filled) / rows + filled;
}

}  // namespace quern::cuda::attention
