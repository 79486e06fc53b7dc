// What the graph's builder and the choice of kernels must know of the gated delta rule's prompt kernels: work space, shared
// memory. Plain C++.
#pragma once

#include <cstdint>

namespace quern::cuda::delta {

/// Rows of a chunk; chunks begin at multiples of it, counted from the first row of a sequence in the step.
inline constexpr int kDeltaChunk = 64;
/// Work space of one chunk of one value head, in bytes (Record, prefill.cuh).
inline constexpr int64_t kDeltaRecordBytes = 16384;

/// Bytes of shared memory of a block of the scan by products of warpgroups (prefill_scan_warpgroups.cuh).
inline constexpr int kWarpgroupScanBytes = 220 * 1024;

/// Whether heads of this shape have the fast kernels: prompts in chunks, answers with S in registers.
constexpr bool has_chunked_heads(int key_dim, int value_dim) { return key_dim == 128 && value_dim == 128; }

/// Counts of `prepare`, I32, zeros before the run: units taken by blocks that had one before; blocks that go on to the end; then, by which
/// it tells the scan what is there, for each chunk and key head the blocks that are done with it.
enum ToldCount { kTakenUnits, kStayingBlocks, kToldChunks };
constexpr int64_t delta_told_counts(int64_t chunks, int64_t key_heads) {
    return kToldChunks + chunks * key_heads;
}

/// An upper bound of the chunks that `tokens` rows of `sequences` sequences make.
inline int64_t delta_chunks(int64_t tokens, int64_t sequences) { return tokens / kDeltaChunk + sequences; }

}  // namespace quern::cuda::delta
