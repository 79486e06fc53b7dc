// Shapes of the products of warpgroups (gemm_warpgroups.cuh), and the shared memory that they take. Plain C++.
#pragma once

#include "ggml-like/cuda/card.h"
#include "ggml-like/cuda/linear/dense_shapes.h"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::linear {

using namespace pack;

/// Splits of a prompt's sums over many columns of a low matrix, each a run of neighbours.
inline constexpr int kPromptSplits = 2;

/// Splits of the sums of answers (few_rows.cuh): of split p pieces p, p + 16, ...; they are added in fours, then the fours.
inline constexpr int kAnswerSplits = 16, kAnswerFours = 4;

struct GemmTask;
struct RankTask;

/// Cluster: blocks that share the columns. Splits: 1, or kAnswerSplits for the sums of answers, of which a block makes all fours
/// or, with Cluster = kAnswerFours, one. Sides: 2 where each half of the tokens has its own multiplying warps. Blocks that have an SM
/// and all columns for themselves, or two sides, can stay there and go from place to place, without emptying their ring in between: of
/// prompts where there are more places than SMs and sums leave as lines (gemm_warpgroups.cuh).
template <int Tokens, int Chunks, int BlocksPerSm, int Cluster, int Splits, int Tiles = 8, int Sides = 1>
struct WarpgroupShape {
    using Task = GemmTask;
    static constexpr bool kOverRanks = false;
    static constexpr int kTokens = Tokens;
    /// Of prompts, FP8 whose chunks have scales: these meet sums of two chunks, which take as many registers again.
    static constexpr int kScaledTokens = Tokens == 256 ? 160 : Tokens / 2;
    static constexpr int kChunks = Chunks;  // of a stage
    static constexpr int kBlocksPerSm = BlocksPerSm;
    static constexpr int kCluster = Cluster;
    static constexpr int kSplits = Splits;
    static constexpr bool kAnswer = Splits == kAnswerSplits;
    static_assert((Splits == 1 && (Cluster == 1 || Cluster == kPromptSplits)) ||
                  (kAnswer && (Cluster == 1 || Cluster == kAnswerFours)));
    static constexpr bool kSendsSums = kAnswer && Cluster > 1;  // to the block that stores a token
    static constexpr int kOwnTokens = Tokens / Cluster;         // that a block stores
    static constexpr int kTiles = Tiles;  // of 16 rows of the matrix, one for each warp of a side
    static constexpr int kSides = Sides, kSideTokens = Tokens / Sides;
    static constexpr bool kStays = Sides > 1 || (Splits == 1 && Cluster == 1 && BlocksPerSm == 1);
    static constexpr int kSumThreads = 32 * Tiles * Sides;
    static_assert(Tiles % 4 == 0 && (!kStays || Cluster == 1) && (Sides == 1 || kAnswer));
    // A block that has its multiprocessor for itself moves registers from the copying warps, a whole group,
    // to the others.
    static constexpr bool kMoveRegisters = BlocksPerSm == 1 && Sides == 1;
    static constexpr int kThreads = kSumThreads + (kMoveRegisters ? 128 : 32);
    static constexpr int kPitch = kTiles * 16 + 4;  // of sums, in floats
    static constexpr int kSumBytes = Tokens * kPitch * 4;
    static constexpr bool kTurns = kStays && !kAnswer;  // sums may leave while the ring is full
};

template <Kind K, class S>
struct StageRing {
    static constexpr int kTileBytes = S::kChunks * chunk_bytes(K);
    static constexpr int kWeights = S::kTiles * kTileBytes;
    static constexpr int kTokens = S::kChunks * S::kTokens * 128;
    static constexpr int kTotals =
        S::kAnswer && S::kCluster == 1 ? S::kSumThreads * S::kSideTokens / 2 * 4 : 0;
    /// Tokens whose sums a warpgroup turns together, 128 bytes each, where they leave while the ring is full. Of NVFP4, whose ring has more
    /// stages, they share what is left.
    static constexpr int kTurned = K == Kind::nvfp4 ? 16 : 64;
    // Room beside the ring: for what is turned, or for sums of answers by blocks that stay. Other sums lie where the ring was.
    static constexpr int kOwnSums = S::kTurns ? S::kTiles / 4 * kTurned * 128 : S::kStays ? S::kSumBytes : 0;
    static constexpr int kRoom = 227 * 1024 / S::kBlocksPerSm - 2048 - S::kTokens * 8 - kTotals - kOwnSums;
    static constexpr int kFitting = kRoom / (kWeights + kTokens);
    static constexpr int kStages = kFitting < 8 ? kFitting : 8;
    static constexpr int kAll = kStages * (kWeights + kTokens);
    static constexpr int kSumsAt = S::kStays && !S::kTurns ? kAll : 0, kTurnedAt = kAll;
    static constexpr int kBytes = kAll + kOwnSums > S::kSumBytes ? kAll + kOwnSums : S::kSumBytes;
    static constexpr int kShared =
        kBytes + S::kTokens * 8 + kTotals + 1024;  // with the lists of rows and factors, and what aligns it
    static_assert(kStages >= 2 && kBytes - kOwnSums <= kRoom);
};

/// Whether this binary has code for sm_90a, with products of warpgroups. Defined in gemm_dense.cu.
bool has_warpgroups();

/// Whether the GPU takes this shape's kernel.
template <Kind K, class S>
constexpr bool warpgroups_fit(const Card& card) {
    return card.warpgroups && StageRing<K, S>::kShared <= card.shared_bytes;
}

// ---- prompts (gemm_dense.cu): up to 128 rows of the matrix, short and low halves 64, and so many tokens ----

using Wide = WarpgroupShape<256, 1, 1, 1, 1>;
static_assert(StageRing<Kind::bf16, Wide>::kStages == 4 && StageRing<Kind::nvfp4, Wide>::kStages == 6);
using Tall = WarpgroupShape<96, 1, 2, 1, 1>;
/// Of a split matrix, a block for each split.
using Halves = WarpgroupShape<256, 1, 1, kPromptSplits, 1>;
template <Kind K>
using ShortHalves = WarpgroupShape<64, K == Kind::bf16 ? 1 : 2, 2, kPromptSplits, 1, 4>;
/// Matrices of up to so many tiles (a router's) take short halves for any number of tokens; BF16 low halves once short halves would need
/// more than one wave of blocks.
inline constexpr int kLowTiles = 64;
using LowHalves = WarpgroupShape<128, 1, 2, kPromptSplits, 1, 4>;

/// What a block of a prompt has at most: tiles of 16 rows of the matrix; tokens, a multiple of 16.
struct PromptCut {
    int tiles, tokens;
};
/// Cuts so that blocks fill the GPU. Tokens: into as many tiles as fit into the waves of blocks that the fewest tiles take, none of fewer
/// than kLeastTokens. Then, if all blocks run in one wave, fewer rows a block.
template <class S>
constexpr PromptCut cut_prompt(int sms, int64_t tiles, int64_t tokens, bool chunk_scales = false) {
    constexpr int64_t kLeastTokens = S::kCluster == 1 ? 16 : 32, kLeastTiles = 2;
    constexpr int64_t kTokenStep = 16;
    const int64_t together = int64_t{sms} * S::kBlocksPerSm;
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const auto blocks = [&](int64_t of_tiles, int64_t cuts) {
        return ceil_div(tiles, of_tiles) * S::kCluster * cuts;
    };
    const int64_t fewest = ceil_div(tokens, chunk_scales ? S::kScaledTokens : S::kTokens),
                  most = ceil_div(tokens, kLeastTokens);
    const int64_t in_waves = ceil_div(blocks(S::kTiles, fewest), together) * together / blocks(S::kTiles, 1);
    const int64_t wanted = in_waves < most ? in_waves : most, cuts = fewest > wanted ? fewest : wanted;
    const int64_t each = ceil_div(ceil_div(tokens, cuts), kTokenStep) * kTokenStep;
    int64_t of_tiles = S::kTiles;
    while (of_tiles > kLeastTiles && blocks(of_tiles - 1, ceil_div(tokens, each)) <= together) --of_tiles;
    return {static_cast<int>(of_tiles), static_cast<int>(each)};
}

// ---- answers of 9 to 64 rows (gemm_answer.cu): 32 rows of x a warp, with 64 a thread would hold too many sums; a stage is a
// piece of the columns ----

template <Kind K>
using Whole = WarpgroupShape<32, kPieceChunks<K>, 2, 1, kAnswerSplits>;
/// The same with an SM for each block, so that more of its weights are on their way.
template <Kind K>
using Lone = WarpgroupShape<32, kPieceChunks<K>, 1, 1, kAnswerSplits>;
template <Kind K>
using Rounds = WarpgroupShape<64, kPieceChunks<K>, 1, 1, kAnswerSplits, 8, 2>;
template <Kind K>
using Quarters = WarpgroupShape<32, kPieceChunks<K>, 2, kAnswerFours, kAnswerSplits>;
template <Kind K>
using LowQuarters = WarpgroupShape<32, kPieceChunks<K>, 2, kAnswerFours, kAnswerSplits, 4>;
/// The same by blocks that add up over ranks (comm/tile_sums.cuh).
template <class S>
struct OverRanks : S {
    using Task = RankTask;
    static constexpr bool kOverRanks = true;
};

/// Whether a part's columns are whole pieces.
template <Kind K>
constexpr bool answers_fit(const Card& card, int chunks) {
    return chunks % kPieceChunks<K> == 0 && warpgroups_fit<K, Whole<K>>(card) &&
           warpgroups_fit<K, Lone<K>>(card) && warpgroups_fit<K, Quarters<K>>(card) &&
           warpgroups_fit<K, Rounds<K>>(card) && warpgroups_fit<K, LowQuarters<K>>(card);
}

}  // namespace quern::cuda::linear
