// How attention of few rows splits the keys of a row. Plain C++: the work space is sized where no CUDA is.
#pragma once

#include <cstdint>

namespace quern::cuda {

inline constexpr int kSplitBlocks = 8;  // blocks that share a chunk of keys: one cluster
inline constexpr int kSplitRows = 8;    // steps of more rows have one chunk a row: rows alone fill the card
inline constexpr int kMaxChunks =
    7;  // chunks of one row and KV head: 14 clusters are what 132 multiprocessors hold
inline constexpr int kChunkKeys = 1024;  // a row of fewer keys has one chunk
inline constexpr int kFewRows = 64;
inline constexpr int kArrivals = 4096;  // counters the kernel may use: 8 for each row and KV head

/// Whether the kernel for few rows takes a step: else the kernel for many.
constexpr bool has_few_rows(int64_t tokens, int64_t sequences, int64_t kv_heads) {
    return (tokens <= kFewRows || tokens <= 4 * sequences) && tokens * kv_heads * kSplitBlocks <= kArrivals;
}

constexpr int most_chunks(int64_t tokens) { return tokens <= kSplitRows ? kMaxChunks : 1; }

/// A block's result: sums of 8 heads of 256 elements, then maximum and sum of each head, in floats.
inline constexpr int kPartFloats = 8 * 256 + 8 * 2;
/// A chunk's result: two elements with their maximum and sum, in float4.
inline constexpr int kChunkPairs = 8 * 128;

}  // namespace quern::cuda
