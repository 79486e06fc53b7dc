// How the tiles of a step's groups (expert_groups.cuh) are shared out evenly, without a row's result depending on it.
//
//     line    | group 0: tiles 0 .. n-1 | group 1: tiles 0 .. n-1 | ...        the shared expert's groups first
//     block   | a run of tiles                  | a run of tiles ...           about the same number of pieces each
//     warp    |  w0  |  w1  | ... |  w15  |                                    the same number of pieces each
//
// Where the border of two warps falls into a tile, the first warp makes the tile's first pieces, as its first work, and
// the second the others, as its last, going on from the first one's sums. So splits are added in order, and nobody
// waits.
#pragma once

#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/moe/expert_groups.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// The weights of the routed experts, or of the shared one.
struct StreamWeights {
    const uint8_t* data;
    const float* factor;
    int64_t expert_bytes;
    int tiles;  // of an expert
    ColumnSplits splits;
    int tile_bytes;
    int pieces = 0;  // of a tile

    StreamWeights(const uint8_t* d, const float* f, int64_t bytes, int t, int chunks)
        : data(d), factor(f), expert_bytes(bytes), tiles(t), splits(chunks), tile_bytes(chunks * kFp4Chunk) {}
};

/// The weights and sizes of a stream (fp4_stream.cuh).
struct Stream {
    StreamWeights routed, shared;
    bool whole;
    int piece_splits, piece_bytes, depth, row_bytes, slots;  // as in StreamShape

    Stream(const StreamShape& s, const StreamWeights& r, const StreamWeights& of_shared)
        : routed(r),
          shared(of_shared),
          whole(s.whole),
          piece_splits(s.piece_splits),
          piece_bytes(s.piece_bytes),
          depth(s.depth),
          row_bytes(s.row_bytes),
          slots(s.slots) {
        routed.pieces = s.pieces(s.routed), shared.pieces = s.pieces(s.shared);
    }
    __device__ __forceinline__ StreamWeights of(bool is_shared) const {
        // Copied, so that fields become selects; a reference would put both into local memory.
        StreamWeights w = routed;
        if (is_shared) w = shared;
        return w;
    }
};

/// Tiles [tile, tile_end) of a group, of each the pieces [begin, end).
struct TileRun {
    int group, tile, tile_end, begin, end;
};

/// The tiles of all groups as one line, those of the shared expert's groups first.
struct TileLine {
    const Stream& s;
    int shared_groups, shared_tiles, tiles;
    Divisor routed_each, shared_each, routed_pieces, shared_pieces;  // tiles of a group, pieces of a tile

    __device__ __forceinline__ TileLine(const Stream& stream, const ExpertGroups& list)
        : s(stream),
          shared_groups(list.shared),
          shared_tiles(shared_groups * stream.shared.tiles),
          tiles(shared_tiles + (list.count - shared_groups) * stream.routed.tiles),
          routed_each(stream.routed.tiles),
          shared_each(stream.shared.tiles),
          routed_pieces(stream.routed.pieces),
          shared_pieces(stream.shared.pieces) {}

    __device__ __forceinline__ bool is_shared(int group) const { return group < shared_groups; }
    __device__ __forceinline__ int first_tile(int group) const {
        return is_shared(group) ? group * s.shared.tiles
                                : shared_tiles + (group - shared_groups) * s.routed.tiles;
    }
    /// Whole tiles of one group from `at` on, at most `most`.
    __device__ __forceinline__ TileRun run(int at, int most) const {
        const bool of_shared = at < shared_tiles;
        const Divisor each = of_shared ? shared_each : routed_each;
        const int rest = of_shared ? at : at - shared_tiles, group = each.quotient(rest),
                  tile = rest - group * each.by();
        return {of_shared ? group : shared_groups + group, tile, min(each.by(), tile + most), 0,
                of_shared ? shared_pieces.by() : routed_pieces.by()};
    }
    /// Pieces of the tiles before a tile.
    __device__ __forceinline__ int pieces_before(int at) const {
        return min(at, shared_tiles) * s.shared.pieces + max(0, at - shared_tiles) * s.routed.pieces;
    }
    /// The tile of a piece; `piece` becomes its place in the tile.
    __device__ __forceinline__ int tile_of(int& piece) const {
        const int of_shared = shared_tiles * s.shared.pieces;
        const bool in_shared = piece < of_shared;
        const Divisor each = in_shared ? shared_pieces : routed_pieces;
        const int rest = in_shared ? piece : piece - of_shared, tile = each.quotient(rest);
        piece = rest - tile * each.by();
        return in_shared ? tile : shared_tiles + tile;
    }
    /// The tile with which block `block` of `blocks` begins. Pieces of the shared expert count five quarters in answers: its
    /// groups are full, and 8 rows take longer to load and to multiply. In prompts a group of few rows costs as much.
    template <bool kPrompt, bool kLate>
    __device__ __forceinline__ int begin_of(int block, int blocks) const {
        constexpr int kMore = kPrompt ? 0 : 1;  // quarters
        if (block == blocks) return tiles;
        const int of_shared = shared_tiles * s.shared.pieces;
        const int at = share_begin(4 * pieces_before(tiles) + kMore * of_shared, block, blocks, kLate);
        int piece = at < (4 + kMore) * of_shared ? at / (4 + kMore) : (at - kMore * of_shared) / 4;
        return tile_of(piece);
    }
};

/// A warp's part of its block's tiles [from, to): first the begin of a tile that the next warp ends, then whole tiles,
/// last the end of a tile that the warp before began.
class WarpRuns {
  public:
    __device__ __forceinline__ WarpRuns(const TileLine& line, int from, int to, int warp) {
        const int before = line.pieces_before(from), pieces = line.pieces_before(to) - before;
        // only where no tile would belong to more than two warps
        const bool split = pieces >= kWarps * max(line.s.routed.pieces, line.s.shared.pieces);
        begin_piece_ = before + warp * pieces / kWarps;
        end_piece_ = before + (warp + 1) * pieces / kWarps;
        begin_ = line.tile_of(begin_piece_);
        end_ = warp + 1 == kWarps ? to : line.tile_of(end_piece_);
        if (!split) begin_piece_ = 0;
        if (!split || warp + 1 == kWarps) end_piece_ = 0;
        at_ = begin_ + (begin_piece_ > 0);
    }
    /// False: there is no more.
    __device__ __forceinline__ bool next(const TileLine& line, TileRun& run) {
        if (end_piece_ > 0) {
            run = line.run(end_, 1);
            run.end = end_piece_;
            end_piece_ = 0;
        } else if (at_ < end_) {
            run = line.run(at_, end_ - at_);
            at_ += run.tile_end - run.tile;
        } else if (begin_piece_ > 0) {
            run = line.run(begin_, 1);
            run.begin = begin_piece_;
            begin_piece_ = 0;
        } else {
            return false;
        }
        return true;
    }

  private:
    int begin_, end_, begin_piece_, end_piece_;  // tiles, and pieces in them
    int at_;                                     // the next whole tile
};

}  // namespace quern::cuda::moe
