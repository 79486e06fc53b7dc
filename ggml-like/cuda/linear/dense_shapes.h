// How launches of products with 1 to 8 rows, or 16, divide a matrix, and the shared memory that they take (dense_one.cuh,
// dense_rows.cuh). Plain C++: kernels and the choice among them (cuda/variants.h) use the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ggml-like/cuda/card.h"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::linear {

using namespace pack;

inline constexpr int kFewRows = 16;
inline constexpr int kWarps = 16;  // of a block
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kPassRows = 8;  // rows of x that one product of tensor cores takes

/// Warps that share a tile: a power of two, at most 16 and at most `chunks` rounded up.
QUERN_BOTH constexpr int warps_per_tile(int chunks) {
    int s = 1;
    while (s < kWarps && s < chunks) s *= 2;
    return s;
}
/// Tile groups of a weight, for sizing the grid.
QUERN_BOTH constexpr int tile_groups(int tiles, int chunks) {
    const int group = kWarps / warps_per_tile(chunks);
    return (tiles + group - 1) / group;
}

/// Activations in shared memory: row n at n * stride. The pad keeps the same eight columns of eight neighbours in different banks.
QUERN_BOTH constexpr int activation_stride(int chunks) { return chunks * kChunkCols + 8; }

/// Chunks of a warp on their way where it copies them one by one. With 16 rows of 4096 activations only two BF16 chunks fit
/// beside them.
template <Kind K, int NT>
constexpr int kRingDepth = K == Kind::bf16  ? (NT == 1 ? 3 : 2)
                           : K == Kind::fp8 ? 4
                                            : 6;
/// Bytes of dynamic shared memory that such rings take.
template <Kind K, int NT>
QUERN_BOTH constexpr int ring_bytes() {
    return kRingDepth<K, NT> * chunk_bytes(K) * kWarps;
}

// ---- dense_rows.cuh ----

/// Chunks that one warp copies and multiplies at a time: small ones in pairs.
QUERN_BOTH constexpr int piece_chunks(Kind kind) { return kind == Kind::bf16 ? 1 : 2; }
QUERN_BOTH constexpr int pieces_for(Kind kind, int chunks) {
    return (chunks + piece_chunks(kind) - 1) / piece_chunks(kind);
}
template <Kind K>
constexpr int kPieceChunks = piece_chunks(K);
template <Kind K>
constexpr int kPieceBytes = piece_chunks(K) * chunk_bytes(K);

/// Whether rings are deep: where a block has 227 KB of shared memory. Kernels are compiled for the one or the other
/// (dense_rows.cuh): machine code for these cards does not run on others.
constexpr bool dense_is_deep(const Card& card) { return card.capability >= 90 && card.capability < 120; }
/// Pieces of a warp on their way. deep: a block takes more than half the 227 KB of an SM (two blocks of one kernel on one SM
/// leave another SM idle). Else it fits beside 8 rows into the 99 KB that a block has on sm_86, 89 and 120, where memory is
/// slower too; sm_80 has 163 KB, too little for deep rings beside 8 rows of many columns.
QUERN_BOTH constexpr int dense_pieces(Kind kind, bool deep) {
    if (!deep) return kind == Kind::nvfp4 ? 2 : 1;
    return kind == Kind::nvfp4 ? 6 : 3;
}
/// Bytes of a warp's ring.
QUERN_BOTH constexpr int dense_ring_bytes(Kind kind, bool deep) {
    return dense_pieces(kind, deep) * piece_chunks(kind) * chunk_bytes(kind);
}

/// Tile groups of a part, for sizing the grid.
QUERN_BOTH constexpr int dense_groups(Kind kind, int tiles, int chunks) {
    return tile_groups(tiles, pieces_for(kind, chunks));
}
/// Tile groups whose sums a block finishes together: a barrier each time, so that warps do not wait for each other at every
/// tile. The sums of one group take 2 KB a row of x. For one row a block stays below 132 KB in all, one of the sizes in
/// which an SM's memory is split, as its neighbours do.
QUERN_BOTH constexpr int groups_together(Kind kind, bool deep, int rows) {
    if (!deep) return rows <= 1 ? 4 : 1;
    if (kind == Kind::bf16) return rows <= 1 ? 8 : rows <= 2 ? 4 : rows <= 8 ? 2 : 1;
    return rows > 4 ? 2 : kind == Kind::fp8 ? 8 : 4;
}
/// Sums of tile groups that are finished together; there are two of these, used alternately.
QUERN_BOTH constexpr int group_sums(Kind kind, bool deep, int rows) {
    return groups_together(kind, deep, rows) * kWarps * 16 * rows;
}
/// Dynamic shared memory of a block.
constexpr int dense_shared_bytes(Kind kind, bool deep, int rows, int chunks) {
    return kWarps * dense_ring_bytes(kind, deep) + rows * activation_stride(chunks) * 2 +
           2 * group_sums(kind, deep, rows) * 4;
}
inline constexpr int kDenseStatic = 1024;  // static shared memory of prologues and ends

/// Whether a block of dense_rows.cuh has what it takes; `beside`: bytes of others, a router's tiles.
constexpr bool dense_rows_fit(const Card& card, Kind kind, int rows, int chunks, int beside) {
    return dense_shared_bytes(kind, dense_is_deep(card), rows, chunks) + kDenseStatic + beside <=
           card.shared_bytes;
}

/// A block that also does a router's work (moe/route_work.cuh): tiles of x that it may have, and of the router a warp; the
/// tiles of the router that it has room for, and the bytes of one.
inline constexpr int kOwnTiles = 2, kRouterTiles = kOwnTiles * kWarps, kRouterTileBytes = 512;

// ---- dense_one.cuh ----

/// How many tiles a block has: those that it finishes together, or (a head) more.
enum class Extent { few, many };
/// Tiles of a block that are finished together.
QUERN_BOTH constexpr int one_rounds(Extent extent) { return extent == Extent::few ? 8 : 16; }
/// Pieces of a warp on their way. ahead: the row is normed, and beside such a block one of moe_down still fits; others leave
/// room for the next kernel's block.
QUERN_BOTH constexpr int one_pieces(Kind kind, bool ahead) {
    if (kind == Kind::bf16) return ahead ? 4 : 2;
    return ahead ? dense_pieces(kind, true) : 3;
}

/// A matrix of which each warp has one piece of every tile: its columns of x stay in registers. Compiled for NVFP4 rows that
/// are normed and not paired.
QUERN_BOTH constexpr bool one_holds(Kind kind, bool ahead, bool paired) {
    return kind == Kind::nvfp4 && ahead && !paired;
}

/// How a launch of one row divides a part of a matrix.
struct OneLaunch {
    int chunks, grid, rounds, steps;  // tiles of a block, pieces of a warp and tile
    bool whole;                       // all pieces are, and each warp has as many
    int least;  // bytes of a row that is not normed: two blocks on one SM would leave another idle

    OneLaunch(const Card& card, Kind kind, int tiles, int n)
        : chunks(n),
          grid(std::min(card.sms, tiles)),
          rounds((tiles + grid - 1) / grid),
          steps((pieces_for(kind, n) + kWarps - 1) / kWarps),
          whole(n % (kWarps * piece_chunks(kind)) == 0),
          least(rounds > 1 ? card.shared_bytes / 2 + 1024 : 0) {}
    int bytes(Kind kind, bool ahead, Extent extent) const {
        const int kept = extent == Extent::many ? 2 * one_rounds(extent) : rounds;
        return std::max(ahead ? 0 : least,
                        kWarps * one_pieces(kind, ahead) * piece_chunks(kind) * chunk_bytes(kind) +
                            chunks * kChunkCols * 2 + kept * kWarps * kTileRows * 4);
    }
};
/// Whether dense_one.cuh takes the part. ahead: its row is normed; paired: gate and up, of which it takes many. Kernels of a
/// normed row that is not paired are compiled for whole pieces.
inline bool dense_one_fits(const Card& card, Kind kind, bool ahead, bool paired, Extent extent, int tiles,
                           int chunks, int beside) {
    if (tiles == 0) return false;
    const OneLaunch one(card, kind, tiles, chunks);
    const bool holds = one_holds(kind, ahead, paired);
    if (ahead && !paired && !one.whole) return false;
    if (holds && one.steps > 1) return false;
    if (extent == Extent::few) {
        if (paired || one.rounds > one_rounds(extent)) return false;
        if (holds && one.rounds > one_pieces(kind, ahead)) return false;  // all are under way at first
    }
    return one.bytes(kind, ahead, extent) + kDenseStatic + beside <= card.shared_bytes;
}

// ---- NVFP4 of few rows (fp4_rows.cuh) ----

inline constexpr int kMaxSplits = 16;
inline constexpr int kFp4Chunk = chunk_bytes(Kind::nvfp4);

/// The sum over a tile's chunks is made of splits, each a run of chunks summed in order; then splits are added
/// in order. So its bits do not depend on who adds.
struct ColumnSplits {
    int chunks;
    int each;   // chunks a split; the last may have fewer
    int count;  // splits

    explicit ColumnSplits(int n)
        : chunks(n), each((n + kMaxSplits - 1) / kMaxSplits), count((n + each - 1) / each) {}
    QUERN_BOTH int begin(int split) const { return split * each; }
    QUERN_BOTH int end(int split) const { return split + 1 == count ? chunks : (split + 1) * each; }
};

/// A row of x in shared memory: 128 bytes a chunk, then a pad that keeps rows of a quarter warp in different
/// banks.
QUERN_BOTH constexpr int fp4_row_bytes(int chunks) { return chunks * 128 + 64; }

}  // namespace quern::cuda::linear
