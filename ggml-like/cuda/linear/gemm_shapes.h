// Shapes of the products of gemm.cuh, and the shared memory that they take. Plain C++.
#pragma once

#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::linear {

using namespace pack;

template <int Tiles, int Tokens, int WarpTiles, int WarpsK, int BlocksPerSm, bool Skip>
struct GemmShape {
    static constexpr int kTiles = Tiles;
    static constexpr int kTokens = Tokens;
    static constexpr int kWarpTiles = WarpTiles;
    static constexpr int kWarpsM = Tiles / WarpTiles;
    static constexpr int kWarpsK = WarpsK;  // also chunks of a stage
    static constexpr int kThreads = 32 * kWarpsM * kWarpsK;
    static constexpr int kBlocksPerSm = BlocksPerSm;
    static constexpr bool kSkip = Skip;  // leave out the products of absent tokens, by quarters
    static constexpr int kLoadRows = kThreads / 8;
    static constexpr int kLoads = Tokens / kLoadRows;
    static_assert(Tokens % kLoadRows == 0 && Tokens % 32 == 0);
};

template <class S>
constexpr int kTokenStage = S::kTokens * 128 * S::kWarpsK;
template <Kind K, class S>
constexpr int kWeightStage = S::kTiles* chunk_bytes(K) * S::kWarpsK;
template <Kind K, class S>
constexpr int kStage = kTokenStage<S> + kWeightStage<K, S>;
/// Besides the stages: the rows of y of the block's tokens, and their factors.
template <class S>
constexpr int kRowListBytes = S::kTokens * 8;
template <Kind K, class S>
constexpr int gemm_shared(int stages) {
    return stages * kStage<K, S> + kRowListBytes<S>;
}

// ---- prompts (gemm_tiles.cu) ----

/// Of dense matrices and of chosen experts.
using Middle = GemmShape<8, 32, 2, 1, 4, false>;
using Many = GemmShape<16, 128, 2, 1, 1, true>;  // the least traffic a product
/// Of a split matrix: 4 warps along the columns. Weights stream once.
using Few = GemmShape<2, 32, 2, 4, 2, false>;
using Narrow = GemmShape<4, 64, 2, 4, 1, false>;

}  // namespace quern::cuda::linear
