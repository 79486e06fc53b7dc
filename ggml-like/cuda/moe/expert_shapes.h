// Shapes of the products of chosen experts with rows of prompts (gemm_experts.cu) on sm_90a; elsewhere
// these are linear/gemm_shapes.h's middle and many. Plain C++.
#pragma once

#include "ggml-like/cuda/linear/warpgroup_shapes.h"

namespace quern::cuda::moe {

using namespace pack;
using namespace linear;

/// A block an SM goes from tile to tile, each kTiles x 16 rows of an expert's matrix and up to 128 of its tokens (expert_tour.cuh).
/// A stage is kChunks chunks of 64 columns; the last may have fewer. FP8 has half the rows, as the sums of a stage take as many registers
/// again.
template <Kind K>
struct Tour {
    static constexpr int kTokens = 128;
    static constexpr int kTiles =
        K == Kind::fp8 ? 8 : 16;  // of 16 rows of the matrix, one for each multiplying warp
    static constexpr int kChunks = K == Kind::bf16 ? 1 : 2;
    /// Threads that copy are a warpgroup, since one changes its registers together; two of its warps have work.
    static constexpr int kSumThreads = 32 * kTiles, kCopyThreads = 128;
    static constexpr int kThreads = kSumThreads + kCopyThreads;
    static constexpr int kSumRegisters = K == Kind::fp8 ? 232 : 112,
                         kCopyRegisters = K == Kind::fp8 ? 40 : 32;
    static constexpr int kStages = 4;
    static constexpr int kChunkTokenBytes = kTokens * 128,
                         kTileBytes = kChunks * chunk_bytes(K);  // of a stage
    static constexpr int kTokenBytes = kChunks * kChunkTokenBytes, kWeightBytes = kTiles * kTileBytes;
    /// Stages of a tile, at least; of a narrow matrix the last has no columns.
    static constexpr int kLeastSteps = 2;
    /// Tiles that a block knows of: those with stages in the ring, the one that is stored, and the next.
    static constexpr int kSlots = (kStages + kLeastSteps - 1) / kLeastSteps + 2;
    static_assert((kSlots - 1) * kLeastSteps >= kStages + 1);  // as TourCopies::tell needs it
    static constexpr int kSlotBytes = kTokens * 8 + 16;
    static constexpr int kBoxTokens = 16;  // that the copy engine brings at a time
    static constexpr int kMaxExperts = kThreads < 512 ? kThreads : 512;  // a thread each
    static constexpr int kListBytes = (512 + 1) * 8 + 64;  // of whichever takes the most experts
    static constexpr int kTurnedAt =
        kStages * (kTokenBytes + kWeightBytes) + kSlots * kSlotBytes + (kListBytes + 15) / 16 * 16;
    static constexpr int kTurnedBytes = 512;  // of a warp: what its warpgroup turns on the way to y
    static constexpr int kShared = kTurnedAt + kTiles * kTurnedBytes + 1024;  // the last aligns it
};

template <Kind K>
constexpr bool tour_fits(const Card& card, int experts) {
    return card.warpgroups && Tour<K>::kShared <= card.shared_bytes && experts <= Tour<K>::kMaxExperts;
}

}  // namespace quern::cuda::moe
