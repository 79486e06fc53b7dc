// Shapes of dense_held.cu, and the shared memory that they take. Plain C++.
#pragma once

#include "ggml-like/cuda/card.h"
#include "ggml-like/cuda/linear/dense_shapes.h"

namespace quern::cuda::linear {

using namespace pack;

/// Chunks of the columns that a warp holds, a piece of a tile: of the whole matrix 16 times as many.
inline constexpr int kHeldChunks = 2;
static_assert(kPieceChunks<Kind::fp8> == kHeldChunks && kPieceChunks<Kind::nvfp4> == kHeldChunks);

/// K: FP8 or NVFP4. kEights: eights of rows of x, 2 or 4.
template <Kind K, int kEights>
struct HeldShape {
    static constexpr int kRows = 8 * kEights;
    static constexpr int kTileBytes = kTileRows * kRows * 4;  // of a warp's sums of a tile
    static constexpr int kTogether = 4;                       // tiles whose sums are added together
    /// Of a warp: x of its columns, later its sums of these tiles.
    static constexpr int kWarpBytes = kHeldChunks * kRows * 128;
    static_assert(kWarpBytes == kTogether * kTileBytes);
    static constexpr int kRoom = (226 * 1024 - 2048) / kWarps - kWarpBytes;
    static constexpr int kDepth = kRoom / kPieceBytes<K> < 8 ? kRoom / kPieceBytes<K> : 8;
    static constexpr int kRingBytes = kDepth * kPieceBytes<K>;
    static constexpr int kShared = kWarps * (kWarpBytes + kRingBytes) + 1024;  // with what aligns it
    static_assert(kDepth >= 2);

    /// Where a tile's sum of its row and row n of x lies, in floats: neighbours in n are neighbours, and what a warp stores at a
    /// time lies in different banks.
    QUERN_BOTH static constexpr int place(int row, int n) {
        return row * kRows + (n ^ (kEights == 4 ? row % 4 * 8 : row / 2 % 2 * 8));
    }
};

inline constexpr int kHeldStatic = 2048;  // shared memory beside, at most
/// A part of 2,048 columns, in whole chunks, that blocks of all SMs can share. kind: FP8 or NVFP4.
inline bool held_fits(const Card& card, Kind kind, int tiles, int chunks) {
    const int bytes = kind == Kind::fp8
                          ? std::max(HeldShape<Kind::fp8, 2>::kShared, HeldShape<Kind::fp8, 4>::kShared)
                          : std::max(HeldShape<Kind::nvfp4, 2>::kShared, HeldShape<Kind::nvfp4, 4>::kShared);
    return card.warpgroups && chunks == kHeldChunks * kWarps && tiles >= card.sms &&
           bytes + kHeldStatic <= card.shared_bytes;
}

}  // namespace quern::cuda::linear
