// How few-row attention splits the keys of a row. Plain C++: the work space is sized where no CUDA is.
#pragma once

#include <cstdint>

namespace quern::cuda {

inline constexpr int kSplitBlocks = 8;   // blocks that share a chunk of keys: one cluster
inline constexpr int kSplitRows = 8;     // steps of more rows have one chunk a row: rows alone fill the card
inline constexpr int kMaxChunks = 7;     // chunks of one row and KV head: 14 clusters fill 15/16 of 132 multiprocessors
inline constexpr int kChunkKeys = 1024;  // a row of fewer keys has one chunk
inline constexpr int kSoloChunks = 4;    // most chunks where there are no clusters

/// Partial results kept for one (row, query head). A card with clusters keeps one a chunk, others one a block.
constexpr int attention_slots(int64_t tokens) { return (tokens <= kSplitRows ? kSoloChunks : 1) * kSplitBlocks; }

}  // namespace quern::cuda
