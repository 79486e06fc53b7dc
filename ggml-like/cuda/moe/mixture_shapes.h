// How launches of NVFP4 mixtures with up to 64 rows divide their work, and the shared memory that they take. Plain C++: the
// kernels and the choice among them (cuda/variants.h) use the same numbers.
#pragma once

#include <algorithm>

#include "ggml-like/cuda/linear/dense_shapes.h"

namespace quern::cuda::moe {

using namespace pack;
using namespace linear;

/// Rows up to which gate and up and moe_down have kernels that hold all of them; moe_down adds terms in shared memory: one kernel
/// less, but every block reads all rows.
inline constexpr int kFewStepRows = 8;
/// Static shared memory of an NVFP4 kernel, at most, in bytes.
inline constexpr int kStatic = 8 * 1024;
/// Rows of a launch of the stream (fp4_stream.cuh), and pairs of a row and an expert.
inline constexpr int kMaxFp4Rows = 64, kGroupPairs = 512;
/// Experts, and used ones, up to which every block of gate and up chooses experts of these rows for itself, which is sooner than waiting
/// for another kernel's choice.
inline constexpr int kMaxChoiceExperts = 256, kMaxChoiceUsed = 8;
inline constexpr int kMaxTerms = 33;  // of a row of moe_down

inline constexpr int kMaxPieces = 8;    // of one ring
inline constexpr int kPieceChunks = 4;  // of a whole piece
inline constexpr int kPieceDepth = 3;   // whole pieces of a ring
inline constexpr int kMaxSlots = 24;    // rows of x that a block of the stream holds, at most

/// Chunks of a split for which kernels of answers are compiled: gate and up of 1,025 to 2,048 columns, down of up to 1,024.
/// Other numbers take kernels to which they are told, also with one row.
inline constexpr int kGateUpEach = 2, kDownEach = 1;
inline constexpr int kFp4PieceChunks = 4;  // of an Fp4Piece (linear/fp4_rows.cuh)

/// Whether all pieces of both matrices can be whole ones.
inline bool has_whole_pieces(const ColumnSplits& a, const ColumnSplits& b) {
    return a.each == b.each && kPieceChunks % a.each == 0 && a.chunks % kPieceChunks == 0 &&
           b.chunks % kPieceChunks == 0;
}

/// The sizes of a stream.
struct StreamShape {
    ColumnSplits routed, shared;
    int compiled_each;  // chunks of a split that a kernel is compiled for; 0: any, as sums of prompts have no splits
    bool whole = false;    // such pieces of kPieceChunks chunks, else the kernel is told of its sizes
    int piece_splits = 0;  // splits a piece
    int piece_bytes = 0;
    int depth = 0;      // pieces of a warp's ring
    int row_bytes = 0;  // of a slot: a row of x in shared memory
    int slots = 0;      // of a block: at least those of one group

    StreamShape(int routed_chunks, int shared_chunks, int each)
        : routed(routed_chunks), shared(shared_chunks), compiled_each(each) {}
    int bytes() const { return kWarps * (depth * piece_bytes + 32 * 16) + slots * row_bytes; }
    int pieces(const ColumnSplits& s) const { return (s.count + piece_splits - 1) / piece_splits; }
};

/// Chooses pieces and slots for `limit` bytes of dynamic shared memory; false: there is not enough.
inline bool fit_stream(StreamShape& s, int limit) {
    const int each = std::max(s.routed.each, s.shared.each);
    const auto fits = [&](int piece_chunks, int depth) {
        s.depth = depth;
        s.piece_splits = std::max(1, piece_chunks / each);
        s.piece_bytes = s.piece_splits * each * kFp4Chunk;
        for (s.slots = kMaxSlots; s.slots >= kPassRows; s.slots -= kPassRows)
            if (s.bytes() <= limit) return true;
        return false;
    };
    s.row_bytes = std::max(fp4_row_bytes(s.routed.chunks), fp4_row_bytes(s.shared.chunks));
    s.whole = has_whole_pieces(s.routed, s.shared) && (s.compiled_each == 0 || s.compiled_each == each) &&
              fits(kPieceChunks, kPieceDepth);
    return s.whole || fits(4, 3) || fits(2, 2) || fits(1, 2);
}

/// What block `block` of `blocks` begins with of `all`, in quarters of pieces, so that all have about as much. late: the last third begins
/// late, each block a bit later than the one before, and has a piece less than that, if there are enough.
QUERN_BOTH constexpr int share_begin(int all, int block, int blocks, bool late) {
    if (block == blocks) return all;
    const int third = blocks / 3, before = block > blocks - third ? block - (blocks - third) : 0;
    int less = 0;
    if (late && all >= 8 * third * blocks) {
        all += 2 * third * (third + 1);  // what late blocks have less
        less = 2 * before * (before + 1);
    }
    return static_cast<int>(static_cast<unsigned>(all) * static_cast<unsigned>(block) /
                            static_cast<unsigned>(blocks)) -
           less;
}

/// A launch of gate_up_fp4_one.cu. tiles: of one expert; of the shared one.
struct GateUpOneLaunch {
    ColumnSplits splits;
    int grid, rounds, piece_bytes, bytes;

    GateUpOneLaunch(const Card& card, int used, int tiles, int shared_tiles, int chunks)
        : splits(chunks), piece_bytes(splits.each * kFp4Chunk) {
        const int routed = used * tiles;
        grid = std::min(card.sms, std::max(routed, shared_tiles));
        rounds = (routed + grid - 1) / grid + (shared_tiles + grid - 1) / grid;
        bytes = std::max(
            kWarps * rounds * piece_bytes + fp4_row_bytes(chunks) + rounds * kMaxSplits * kTileRows * 4,
            card.shared_bytes / 2 + 1024);  // two blocks on one SM would leave another idle
    }
    /// The kernel is compiled for kGateUpEach chunks a split.
    bool fits(const Card& card) const {
        return splits.each == kGateUpEach && splits.chunks % kGateUpEach == 0 &&
               bytes <= card.shared_bytes - kStatic && rounds <= kMaxPieces;
    }
};

/// A launch of gate_up_fp4_few.cu: 2 to kFewStepRows rows.
struct GateUpFewLaunch {
    static constexpr int kMaxDepth = 4, kMaxTiles = 32;  // tiles on their way, tiles of a block
    static constexpr int kMaxColumns = 96;               // of a block's sums
    /// Floats of a column of sums: 16 of each split, and 16 more, so that neighbours are in other banks.
    static constexpr int kColumn = (kMaxSplits + 1) * kTileRows;

    ColumnSplits splits;
    int grid, tiles, columns;  // blocks; tiles and columns of a block, at most
    int depth, bytes;          // tiles on their way; of dynamic shared memory

    GateUpFewLaunch(const Card& card, int rows, int used, int expert_tiles, int shared_tiles, int chunks)
        : splits(chunks) {
        const int all = rows * used * expert_tiles + shared_tiles;
        grid = std::min(card.sms, all + 1);  // the first block only writes what was chosen
        const int blocks = std::max(1, grid - 1);
        const auto of_block = [&](int n) { return (n + blocks - 1) / blocks; };
        tiles = of_block(all);
        columns = rows * (used * of_block(expert_tiles) + of_block(shared_tiles));
        const int rest = rows * fp4_row_bytes(chunks) + columns * kColumn * 4;
        depth = std::min(kMaxDepth, (card.shared_bytes - kStatic - rest) / (chunks * kFp4Chunk));
        // two blocks on one SM would leave another idle
        bytes = std::max(depth * chunks * kFp4Chunk + rest, card.shared_bytes / 2 + 1024);
    }
    /// The kernel is compiled for kGateUpEach chunks a split, and has the copy engine bring its tiles.
    bool fits(const Card& card, int rows) const {
        return card.capability >= 90 && rows > 1 && rows <= kFewStepRows && splits.each == kGateUpEach &&
               splits.chunks % kFp4PieceChunks == 0 && tiles <= kMaxTiles && columns <= kMaxColumns &&
               depth >= 2;
    }
};

/// What a block of down_fp4_one.cu is told of its sizes.
struct DownShape {
    ColumnSplits routed, shared;  // of the columns of an expert, of the shared expert
    int piece_bytes = 0;
    int depth = 0;  // pieces of a warp's ring

    DownShape(int routed_chunks, int shared_chunks) : routed(routed_chunks), shared(shared_chunks) {}
};

/// Such a launch.
struct DownLaunch {
    DownShape shape;
    int bytes = 0;  // of dynamic shared memory
    bool fits = false;
};

/// Bytes of a row's routed and shared_in in shared memory.
inline int down_row_bytes(int used, const DownShape& s) {
    return used * fp4_row_bytes(s.routed.chunks) + fp4_row_bytes(s.shared.chunks);
}

/// One row: all splits of all terms are under way at the same time. The kernel is compiled for whole ones.
inline DownLaunch down_one_launch(const Card& card, int used, int routed_chunks, int shared_chunks) {
    DownLaunch l{DownShape(routed_chunks, shared_chunks)};
    DownShape& s = l.shape;
    const int units = used * s.routed.count + s.shared.count;
    s.piece_bytes = std::max(s.routed.each, s.shared.each) * kFp4Chunk;
    s.depth = (units + kWarps - 1) / kWarps;
    const bool whole = s.routed.each == kDownEach && s.routed.chunks == s.shared.chunks &&
                       s.routed.chunks % s.routed.each == 0 && kWarps % s.routed.count == 0;
    l.bytes = kWarps * s.depth * s.piece_bytes + down_row_bytes(used, s) + units * kTileRows * 4;
    l.fits = whole && l.bytes <= card.shared_bytes - kStatic && s.depth <= kMaxPieces && used < kMaxTerms - 1;
    return l;
}

/// A launch of down_fp4_few.cu: 2 to kFewStepRows rows.
struct DownFewLaunch {
    static constexpr int kUnit = 2;                // chunks of a warp that come together
    static constexpr int kStaticBytes = 4 * 1024;  // shared memory beside, at most
    static constexpr int kDeep = 4, kShallow = 2;  // of these, on their way
    ColumnSplits splits;       // of the columns of an expert and of the shared expert alike
    int column, depth, bytes;  // floats of a term's sums; kDeep if it fits; dynamic shared memory
    bool fits;

    DownFewLaunch(const Card& card, int rows, int used, int routed_chunks, int shared_chunks)
        : splits(routed_chunks) {
        column =
            (splits.count + 1) * kTileRows;  // 16 more than there are, so that neighbours are in other banks
        const int terms = rows * (used + 1);
        const int rest = terms * (fp4_row_bytes(routed_chunks) + (column + kTileRows) * 4);
        const auto with = [&](int d) { return rest + kWarps * d * kUnit * kFp4Chunk; };
        depth = with(kDeep) <= card.shared_bytes - kStaticBytes ? kDeep : kShallow;
        bytes = with(depth);
        fits = rows > 1 && rows <= kFewStepRows && used <= kMaxChoiceUsed && splits.each == kDownEach &&
               shared_chunks == routed_chunks && routed_chunks % kFp4PieceChunks == 0 &&
               kUnit * kWarps % splits.count == 0 && bytes <= card.shared_bytes - kStaticBytes;
    }
};

}  // namespace quern::cuda::moe
