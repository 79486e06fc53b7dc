// How the chunked gated delta rule cuts a step: what the graph's builder must know of its work space.
#pragma once

#include <cstdint>

namespace quern::cuda {

/// Rows of a chunk.
inline constexpr int kDeltaChunk = 64;
/// Work space of one chunk of one value head.
inline constexpr int64_t kDeltaRecordBytes = 16384;

/// Most chunks that `tokens` rows of `sequences` sequences make.
inline int64_t delta_chunks(int64_t tokens, int64_t sequences) { return tokens / kDeltaChunk + sequences; }

}  // namespace quern::cuda
