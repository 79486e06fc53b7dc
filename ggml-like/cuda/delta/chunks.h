// What the graph's builder must know of the gated delta rule's work space.
#pragma once

#include <cstdint>

namespace quern::cuda::delta {

/// Rows of a chunk.
inline constexpr int kDeltaChunk = 64;
/// Work space of one chunk of one value head.
inline constexpr int64_t kDeltaRecordBytes = 16384;

/// Whether prompts of such heads are computed in chunks, and answers with the state in registers.
constexpr bool has_chunked_heads(int key_dim, int value_dim) { return key_dim == 128 && value_dim == 128; }

/// Most chunks that `tokens` rows of `sequences` sequences make.
inline int64_t delta_chunks(int64_t tokens, int64_t sequences) { return tokens / kDeltaChunk + sequences; }

}  // namespace quern::cuda::delta
