// Shapes of the products of warpgroups (gemm_warpgroups.cuh), and the shared memory that they take.
#pragma once

#include "ggml-like/cuda/linear/gemm_task.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// Parts that the sum over a split matrix's columns is made of, each a run of neighbours.
inline constexpr int kSplitParts = 2;

/// Parts of the sums of answers (few_rows.cuh): of part p chunks p, p + 16, ...; they are added in fours, then the fours.
inline constexpr int kAnswerParts = 16, kAnswerFours = 4;

/// Split: blocks that share the columns. Parts: 1, or kAnswerParts for the sums of answers, of which a block makes all fours
/// or, with Split = kAnswerFours, one.
template <int Tokens, int Chunks, int BlocksPerSm, int Split, int Parts, bool Gather>
struct WarpgroupShape {
    static constexpr int kTokens = Tokens;
    static constexpr int kChunks = Chunks;  // of a stage
    static constexpr int kBlocksPerSm = BlocksPerSm;
    static constexpr int kSplit = Split;
    static constexpr int kParts = Parts;
    static constexpr bool kAnswer = Parts == kAnswerParts;
    static_assert((Parts == 1 && (Split == 1 || Split == kSplitParts)) ||
                  (kAnswer && Chunks == 1 && (Split == 1 || Split == kAnswerFours)));
    static constexpr bool kGather = Gather;  // grouped: any rows of x
    static constexpr int kTiles = 8;
    static constexpr int kSumThreads = 256;
    // A block that has its multiprocessor for itself moves registers from the copying warps, a whole group,
    // to the others.
    static constexpr bool kMoveRegisters = BlocksPerSm == 1;
    static constexpr int kThreads = kSumThreads + (kMoveRegisters ? 128 : Gather ? 64 : 32);
    static constexpr int kPitch = kTiles * 16 + 4;  // of sums, in floats
    static constexpr int kSumBytes = Tokens * kPitch * 4;
};

template <Kind K, class S>
struct Ring {
    static constexpr int kTileBytes = S::kChunks * chunk_bytes(K);
    static constexpr int kWeights = S::kTiles * kTileBytes;
    static constexpr int kTokens = S::kChunks * S::kTokens * 128;
    static constexpr int kTotals = S::kAnswer && S::kSplit == 1 ? S::kSumThreads * S::kTokens / 2 * 4 : 0;
    static constexpr int kRoom = 227 * 1024 / S::kBlocksPerSm - 2048 - S::kTokens * 8 - kTotals;
    static constexpr int kMost = kRoom / (kWeights + kTokens);
    static constexpr int kStages = kMost < 8 ? kMost : 8;
    static constexpr int kAll = kStages * (kWeights + kTokens);
    static constexpr int kBytes = kAll > S::kSumBytes ? kAll : S::kSumBytes;
    static constexpr int kShared =
        kBytes + S::kTokens * 8 + kTotals + 1024;  // with the lists of rows and factors, and what aligns it
    static_assert(kStages >= 2 && kBytes <= kRoom);
};

}  // namespace quern::cuda::linear
