// All groups of a step (expert_groups.cuh) times their NVFP4 tiles, shared out evenly: blocks take runs of tiles of
// neighbouring groups and hold those groups' rows in shared memory, warps take equal runs of a block's pieces. A tile that
// two warps share is begun by the first, as its first work, and ended by the second, as its last: parts meet in order and
// nobody waits. A row's bits depend on the row only.
//
// Traffic: weights once a group; rows once for each block that has tiles of their group.
#pragma once

#include "ggml-like/cuda/expert_groups.cuh"
#include "ggml-like/cuda/few_rows.cuh"

namespace quern::cuda {

inline constexpr int kMostSlots = 24;

/// Weights of one width: of the routed experts, or of the shared one.
struct StreamWeights {
    const uint8_t* data;
    const float* factor;
    int64_t expert_bytes;
    int tiles;       // of an expert
    ChunkParts parts;
    int tile_bytes;
    int pieces = 0;  // of a tile

    StreamWeights(const uint8_t* d, const float* f, int64_t bytes, int t, int chunks)
        : data(d), factor(f), expert_bytes(bytes), tiles(t), parts(chunks), tile_bytes(chunks * kFp4Chunk) {}
};

struct Stream {
    StreamWeights routed, shared;
    int piece_parts = 0;  // parts a piece
    int piece_bytes = 0;
    int depth = 0;      // pieces of a warp's ring
    int row_bytes = 0;  // of a slot
    int slots = 0;      // rows that a block holds; a group's fit

    __host__ __device__ int bytes() const {
        return kWarps * (depth * piece_bytes + 32 * static_cast<int>(sizeof(float4))) + slots * row_bytes;
    }
    __device__ __forceinline__ StreamWeights of(bool is_shared) const {
        StreamWeights w = routed;  // fields that are used become selects; a reference would put both into local memory
        if (is_shared) w = shared;
        return w;
    }
};

/// Chooses pieces and slots for `limit` bytes of dynamic shared memory; false: there is not enough.
inline bool fit_stream(Stream& s, int limit) {
    const int each = max(s.routed.parts.each, s.shared.parts.each);
    s.row_bytes = max(fp4_row_bytes(s.routed.parts.chunks), fp4_row_bytes(s.shared.parts.chunks));
    for (s.slots = kMostSlots; s.slots >= kPassRows; s.slots -= kPassRows)
        for (s.piece_parts = 4; s.piece_parts > 0; s.piece_parts /= 2) {
            s.piece_bytes = s.piece_parts * each * kFp4Chunk;
            s.depth = 0;
            s.depth = min(kMostPieces, (limit - s.bytes()) / (kWarps * s.piece_bytes));
            for (StreamWeights* w : {&s.routed, &s.shared})
                w->pieces = (w->parts.count + s.piece_parts - 1) / s.piece_parts;
            if (s.depth >= 3) return true;
        }
    return false;
}

/// Pieces [begin, end) of one tile.
struct TileRun {
    int group, tile, begin, end;
};

/// The tiles of all groups in a row, those of the shared expert's groups first.
struct TileLine {
    const Stream& s;
    int shared_groups, shared_tiles, tiles;

    __device__ __forceinline__ TileLine(const Stream& stream, const ExpertGroups& list)
        : s(stream), shared_groups(list.shared), shared_tiles(shared_groups * stream.shared.tiles),
          tiles(shared_tiles + (list.count - shared_groups) * stream.routed.tiles) {}

    __device__ __forceinline__ bool is_shared(int group) const { return group < shared_groups; }
    __device__ __forceinline__ int first_tile(int group) const {
        return is_shared(group) ? group * s.shared.tiles : shared_tiles + (group - shared_groups) * s.routed.tiles;
    }
    __device__ __forceinline__ void locate(int at, TileRun& run) const {
        const bool of_shared = at < shared_tiles;
        const int rest = of_shared ? at : at - shared_tiles, each = s.of(of_shared).tiles;
        run.group = rest / each;
        run.tile = rest - run.group * each;
        if (!of_shared) run.group += shared_groups;
    }
    /// Pieces before a tile.
    __device__ __forceinline__ int pieces_before(int at) const {
        return min(at, shared_tiles) * s.shared.pieces + max(0, at - shared_tiles) * s.routed.pieces;
    }
    /// The tile of a piece; `piece` becomes its place in the tile.
    __device__ __forceinline__ int tile_of(int& piece) const {
        const int of_shared = shared_tiles * s.shared.pieces;
        const bool in_shared = piece < of_shared;
        const int rest = in_shared ? piece : piece - of_shared, each = s.of(in_shared).pieces, tile = rest / each;
        piece = rest - tile * each;
        return in_shared ? tile : shared_tiles + tile;
    }
    /// Where block `block` of `blocks` begins.
    __device__ __forceinline__ int begin_of(int block, int blocks) const {
        if (block == blocks) return tiles;
        int piece = static_cast<int>(static_cast<int64_t>(pieces_before(tiles)) * block / blocks);
        return tile_of(piece);
    }
};

/// A warp's runs of tiles [from, to) that its block has: the begin of a tile that the next warp ends, whole tiles, the end
/// of a tile that the warp before began.
class WarpRuns {
  public:
    TileRun run;

    __device__ __forceinline__ WarpRuns(const TileLine& line, int from, int to, int warp) : line_(line) {
        const int before = line.pieces_before(from), pieces = line.pieces_before(to) - before;
        // a tile belongs to two warps at most
        const bool split = pieces >= kWarps * max(line.s.routed.pieces, line.s.shared.pieces);
        begin_piece_ = before + warp * pieces / kWarps;
        end_piece_ = before + (warp + 1) * pieces / kWarps;
        begin_ = line.tile_of(begin_piece_);
        end_ = warp + 1 == kWarps ? to : line.tile_of(end_piece_);
        if (!split) begin_piece_ = 0;
        if (!split || warp + 1 == kWarps) end_piece_ = 0;
        whole_ = end_ - begin_ - (begin_piece_ > 0);
        settle();
    }
    __device__ __forceinline__ bool any() const { return index_ < (end_piece_ > 0) + whole_ + (begin_piece_ > 0); }
    __device__ __forceinline__ void advance() {
        ++index_;
        settle();
    }

  private:
    __device__ __forceinline__ void settle() {
        const int first_whole = end_piece_ > 0;
        const auto pieces = [&] { return line_.s.of(line_.is_shared(run.group)).pieces; };
        if (!any()) return;
        if (index_ > first_whole && index_ < first_whole + whole_) {
            if (++run.tile == line_.s.of(line_.is_shared(run.group)).tiles) run.tile = 0, ++run.group;
        } else {
            const bool is_last = index_ == first_whole + whole_;
            line_.locate(index_ < first_whole ? end_ : begin_ + (!is_last && begin_piece_ > 0), run);
        }
        run.begin = index_ == first_whole + whole_ ? begin_piece_ : 0;
        run.end = index_ < first_whole ? end_piece_ : pieces();
    }

    const TileLine& line_;
    int begin_, end_, begin_piece_, end_piece_;  // tiles, and pieces in them
    int whole_;
    int index_ = 0;
};

/// What the streams of one kernel keep in static shared memory.
struct StreamShared {
    uint64_t barriers[kWarps][kMostPieces];
    uint64_t handed[kWarps];
    ExpertGroups list;
    int index[kMostSlots];  // of a slot: its pair, or its row of the shared expert
    float weight[kMostSlots];
};

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

/// Whole block; k.list is complete. Work:
///   kRowsFirst              rows are asked for before weights; else weights, before_rows(), rows
///   row(is_shared, index), width(is_shared)   of x
///   weight(is_shared, index)                  a number of its own that a row's results need
///   store(is_shared, index, weight, tile, r, low, high, low_factor, high_factor)
///                           sums of rows r and r + 8 of a tile, and their factors
template <class Work>
__device__ __forceinline__ void stream_groups(const Work& work, const Stream& s, StreamShared& k, uint8_t* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2;
    float4* totals = reinterpret_cast<float4*>(memory);  // [warp][lane]
    uint8_t* ring_data = memory + kWarps * 32 * sizeof(float4);
    uint8_t* rows = ring_data + kWarps * s.depth * s.piece_bytes;
    PieceRing ring(ring_data + warp * s.depth * s.piece_bytes, k.barriers[warp], s.piece_bytes, s.depth, lane);
    if (lane == 0) init_barrier(&k.handed[warp]);
    uint32_t handed_parity = 0;
    const TileLine line(s, k.list);
    const int end = line.begin_of(blockIdx.x + 1, gridDim.x);
    int to;
    for (int from = line.begin_of(blockIdx.x, gridDim.x); from < end; from = to) {
        // Groups whose rows fit; first_row, first_pair: of the shared and of the routed ones.
        TileRun place;
        line.locate(from, place);
        int next = place.group, shared_rows = 0, slots = 0, first_row = 0, first_pair = 0;
        for (; next < k.list.count && line.first_tile(next) < end && slots + k.list.group[next].count <= s.slots; ++next) {
            const ExpertGroup group = k.list.group[next];
            if (slots == 0) first_row = group.first;
            if (slots == shared_rows) first_pair = group.first;
            slots += group.count;
            if (group.expert < 0) shared_rows = slots;
        }
        to = min(end, line.first_tile(next));

        // Rows of x, 16 numbers a thread at a time.
        const int blocks = s.row_bytes / 32;
        const auto load_block = [&](Fp4Block& block, int b) {
            const int slot = b / blocks, column = (b - slot * blocks) * 16;
            if (slot >= slots) return;
            const bool is_shared = slot < shared_rows;
            const int index = is_shared ? first_row + slot : k.list.pair[first_pair + slot - shared_rows];
            if (column < work.width(is_shared)) block.load(work.row(is_shared, index) + column);
        };
        const auto store_block = [&](const Fp4Block& block, int b) {
            const int slot = b / blocks;
            if (slot < slots) block.store(rows + slot * s.row_bytes, b - slot * blocks);
        };
        constexpr int kEarly = 2;
        Fp4Block early[kEarly];
        const auto load_early = [&] {
#pragma unroll
            for (int i = 0; i < kEarly; ++i) load_block(early[i], threadIdx.x + i * kThreads);
        };
        if constexpr (Work::kRowsFirst) load_early();
        if (static_cast<int>(threadIdx.x) < slots) {
            const int slot = threadIdx.x;
            const bool is_shared = slot < shared_rows;
            const int index = is_shared ? first_row + slot : k.list.pair[first_pair + slot - shared_rows];
            k.index[slot] = index;
            k.weight[slot] = work.weight(is_shared, index);
        }

        WarpRuns ahead(line, from, to, warp), now = ahead;
        const uint8_t* source = nullptr;
        int left = 0;  // bytes of the run
        const auto find_source = [&] {
            if (!ahead.any()) return;
            const TileRun& run = ahead.run;
            const StreamWeights w = s.of(line.is_shared(run.group));
            const int expert = max(0, static_cast<int>(k.list.group[run.group].expert));
            source = w.data + expert * w.expert_bytes + static_cast<int64_t>(run.tile) * w.tile_bytes;
            const int piece = s.piece_parts * w.parts.each * kFp4Chunk;
            source += run.begin * piece;
            left = min(run.end * piece, w.tile_bytes) - run.begin * piece;
        };
        find_source();
        const auto request = [&] {
            if (left == 0) return;
            const int bytes = min(left, s.piece_parts * s.of(line.is_shared(ahead.run.group)).parts.each * kFp4Chunk);
            ring.request(source, bytes);
            source += bytes;
            left -= bytes;
            if (left > 0) return;
            ahead.advance();
            find_source();
        };
#pragma unroll 1
        for (int i = 0; i < s.depth; ++i) request();
        if constexpr (!Work::kRowsFirst) {
            work.before_rows();
            load_early();
        }
#pragma unroll
        for (int i = 0; i < kEarly; ++i) store_block(early[i], threadIdx.x + i * kThreads);
#pragma unroll 2
        for (int b = threadIdx.x + kEarly * kThreads; b < slots * blocks; b += kThreads) {
            Fp4Block block;
            load_block(block, b);
            store_block(block, b);
        }
        __syncthreads();

        for (; now.any(); now.advance()) {
            const TileRun& run = now.run;
            const ExpertGroup group = k.list.group[run.group];
            const bool is_shared = group.expert < 0;
            const StreamWeights w = s.of(is_shared);
            const float* factor = w.factor + (max(0, static_cast<int>(group.expert)) * w.tiles + run.tile) * kTileRows + g;
            const float low_factor = factor[0], high_factor = factor[8];
            const int slot = is_shared ? group.first - first_row : shared_rows + group.first - first_pair;
            const uint8_t* x = rows + (slot + min(g, group.count - 1)) * s.row_bytes + 16 * (lane & 3);
            float total[4] = {};
            if (run.begin > 0) {
                wait_barrier(&k.handed[warp - 1], handed_parity);
                handed_parity ^= 1;
                const float4 v = totals[(warp - 1) * 32 + lane];
                total[0] = v.x, total[1] = v.y, total[2] = v.z, total[3] = v.w;
            }
            const int first = run.begin * s.piece_parts, last = min(run.end * s.piece_parts, w.parts.count);
            if (group.count == 1)
                sum_parts<true>(ring, w.parts, first, last, s.piece_parts, x, lane, request, total);
            else
                sum_parts<false>(ring, w.parts, first, last, s.piece_parts, x, lane, request, total);
            if (run.end < w.pieces) {
                totals[warp * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
                arrive(&k.handed[warp]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int n = 2 * (lane & 3) + i;
                if (n < group.count)
                    work.store(is_shared, k.index[slot + n], k.weight[slot + n], run.tile, g, total[i], total[2 + i],
                               low_factor, high_factor);
            }
        }
        __syncthreads();  // rows and totals are done with
    }
}

}  // namespace quern::cuda
