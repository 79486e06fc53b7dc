// How few-row attention splits the keys of a row. Plain C++: the work space is sized where no CUDA is.
#pragma once

#include <cstdint>

namespace quern::cuda {

inline constexpr int kSplitBlocks = 8;    // blocks that share a chunk of keys: one cluster
inline constexpr int kMaxChunks = 8;      // chunks of one row and KV head
inline constexpr int kChunkKeys = 1024;   // a row of fewer keys has one chunk
inline constexpr int kSoloChunks = 4;     // most chunks where there are no clusters

/// Partial results kept for one (row, query head). A card with clusters keeps one a chunk, others one a block; beyond
/// 8 rows those take a single chunk, since rows alone fill the card.
constexpr int attention_slots(int64_t tokens) { return tokens <= 8 ? kSoloChunks * kSplitBlocks : kMaxChunks; }

}  // namespace quern::cuda
