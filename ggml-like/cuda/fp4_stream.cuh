// All groups of a step (expert_groups.cuh) times their NVFP4 tiles, shared out evenly: blocks take runs of
// tiles of neighbouring groups and hold those groups' rows in shared memory, warps take equal runs of a
// block's pieces. A tile that two warps share is begun by the first, as its first work, and ended by the
// second, as its last: parts meet in order and nobody waits. A row's bits depend on the row only.
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
    int tiles;  // of an expert
    ChunkParts parts;
    int tile_bytes;
    int pieces = 0;  // of a tile

    StreamWeights(const uint8_t* d, const float* f, int64_t bytes, int t, int chunks)
        : data(d), factor(f), expert_bytes(bytes), tiles(t), parts(chunks), tile_bytes(chunks * kFp4Chunk) {}
};

inline constexpr int kPieceChunks = 4;
inline constexpr int kPieceDepth = 3;

/// A warp's ring of kPieceDepth pieces of kPieceChunks chunks. Its waits count groups of copies, which takes
/// fewer instructions than PieceRing's barriers: every piece that is read makes room for one request, of
/// nothing at the end.
class WholePieceRing {
  public:
    static constexpr int kBytes = kPieceChunks * kFp4Chunk;

    __device__ __forceinline__ WholePieceRing(uint8_t* data, int lane) : data_(data), lane_(lane) {}
    /// The next request, kPieceDepth of them before the first read; null: nothing, in its turn.
    __device__ __forceinline__ void request(const uint8_t* from) {
        if (from != nullptr) {
            uint8_t* to = data_ + at_ + 16 * lane_;
            static_assert(kBytes == 4 * 512 + 256);
#pragma unroll
            for (int i = 0; i < 4; ++i) copy_async16(to + 512 * i, from + 16 * lane_ + 512 * i);
            asm volatile(
                "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to + 2048 - 8 * lane_)),
                "l"(from + 2048 + 8 * lane_));
        }
        commit_copies();
        at_ = at_ + kBytes == kPieceDepth * kBytes ? 0 : at_ + kBytes;
    }
    /// The oldest requested piece; its place is the next request's.
    __device__ __forceinline__ const uint8_t* wait() {
        wait_copies<kPieceDepth - 1>();
        __syncwarp();
        return data_ + at_;
    }
    __device__ __forceinline__ void release() { __syncwarp(); }

  private:
    uint8_t* data_;
    int lane_;
    int at_ = 0;
};

struct Stream {
    StreamWeights routed, shared;
    int each = 0;         // chunks a part if pieces are WholePieceRing's, else 0
    int piece_parts = 0;  // parts a piece
    int piece_bytes = 0;
    int depth = 0;      // pieces of a warp's ring
    int row_bytes = 0;  // of a slot
    int slots = 0;      // rows that a block holds; a group's fit

    __host__ __device__ int bytes() const {
        return kWarps * (depth * piece_bytes + 32 * static_cast<int>(sizeof(float4))) + slots * row_bytes;
    }
    __device__ __forceinline__ StreamWeights of(bool is_shared) const {
        StreamWeights w =
            routed;  // fields that are used become selects; a reference would put both into local memory
        if (is_shared) w = shared;
        return w;
    }
};

/// Chooses pieces and slots for `limit` bytes of dynamic shared memory; false: there is not enough.
inline bool fit_stream(Stream& s, int limit) {
    const int each = max(s.routed.parts.each, s.shared.parts.each);
    const auto fits = [&](int piece_chunks, int depth) {
        s.depth = depth;
        s.piece_parts = max(1, piece_chunks / each);
        s.piece_bytes = s.piece_parts * each * kFp4Chunk;
        for (StreamWeights* w : {&s.routed, &s.shared})
            w->pieces = (w->parts.count + s.piece_parts - 1) / s.piece_parts;
        for (s.slots = kMostSlots; s.slots >= kPassRows; s.slots -= kPassRows)
            if (s.bytes() <= limit) return true;
        return false;
    };
    s.row_bytes = max(fp4_row_bytes(s.routed.parts.chunks), fp4_row_bytes(s.shared.parts.chunks));
    const auto whole = [&](const ChunkParts& p) { return p.each == each && p.chunks % kPieceChunks == 0; };
    if (kPieceChunks % each == 0 && whole(s.routed.parts) && whole(s.shared.parts) &&
        fits(kPieceChunks, kPieceDepth)) {
        s.each = each;
        return true;
    }
    return fits(4, 3) || fits(2, 2) || fits(1, 2);
}

/// Tiles [tile, tile_end) of a group; of each, pieces [begin, end).
struct Stretch {
    int group, tile, tile_end, begin, end;
};

/// The tiles of all groups in a row, those of the shared expert's groups first.
struct TileLine {
    const Stream& s;
    int shared_groups, shared_tiles, tiles;

    __device__ __forceinline__ TileLine(const Stream& stream, const ExpertGroups& list)
        : s(stream),
          shared_groups(list.shared),
          shared_tiles(shared_groups * stream.shared.tiles),
          tiles(shared_tiles + (list.count - shared_groups) * stream.routed.tiles) {}

    __device__ __forceinline__ bool is_shared(int group) const { return group < shared_groups; }
    __device__ __forceinline__ int first_tile(int group) const {
        return is_shared(group) ? group * s.shared.tiles
                                : shared_tiles + (group - shared_groups) * s.routed.tiles;
    }
    /// Whole tiles of one group from `at` on, at most `most`.
    __device__ __forceinline__ Stretch stretch(int at, int most) const {
        const bool of_shared = at < shared_tiles;
        const StreamWeights w = s.of(of_shared);
        const int rest = of_shared ? at : at - shared_tiles, group = rest / w.tiles,
                  tile = rest - group * w.tiles;
        return {of_shared ? group : shared_groups + group, tile, min(w.tiles, tile + most), 0, w.pieces};
    }
    /// Pieces before a tile.
    __device__ __forceinline__ int pieces_before(int at) const {
        return min(at, shared_tiles) * s.shared.pieces + max(0, at - shared_tiles) * s.routed.pieces;
    }
    /// The tile of a piece; `piece` becomes its place in the tile.
    __device__ __forceinline__ int tile_of(int& piece) const {
        const int of_shared = shared_tiles * s.shared.pieces;
        const bool in_shared = piece < of_shared;
        const int rest = in_shared ? piece : piece - of_shared, each = s.of(in_shared).pieces,
                  tile = rest / each;
        piece = rest - tile * each;
        return in_shared ? tile : shared_tiles + tile;
    }
    /// The tile with which block `block` of `blocks` begins. Groups of the shared expert are full: 8 rows to
    /// load and to multiply make them a quarter slower than the others.
    __device__ __forceinline__ int begin_of(int block, int blocks) const {
        if (block == blocks) return tiles;
        const int of_shared = shared_tiles * s.shared.pieces, all = 4 * pieces_before(tiles) + of_shared;
        const int at = static_cast<int>(static_cast<unsigned>(all) * static_cast<unsigned>(block) / blocks);
        int piece = at < 5 * of_shared ? at / 5 : (at - of_shared) / 4;
        return tile_of(piece);
    }
};

/// A warp's part of the tiles [from, to) that its block has: first the begin of a tile that the next warp
/// ends, then whole tiles, last the end of a tile that the warp before began.
class WarpShare {
  public:
    __device__ __forceinline__ WarpShare(const TileLine& line, int from, int to, int warp) {
        const int before = line.pieces_before(from), pieces = line.pieces_before(to) - before;
        // a tile belongs to two warps at most
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
    __device__ __forceinline__ bool next(const TileLine& line, Stretch& stretch) {
        if (end_piece_ > 0) {
            stretch = line.stretch(end_, 1);
            stretch.end = end_piece_;
            end_piece_ = 0;
        } else if (at_ < end_) {
            stretch = line.stretch(at_, end_ - at_);
            at_ += stretch.tile_end - stretch.tile;
        } else if (begin_piece_ > 0) {
            stretch = line.stretch(begin_, 1);
            stretch.begin = begin_piece_;
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

/// What the streams of one kernel keep in static shared memory.
struct StreamShared {
    uint64_t barriers[kWarps][kMostPieces];
    uint64_t handed[kWarps];
    ExpertGroups list;
    int index[kMostSlots];  // of a slot: its pair, or its row of the shared expert
    float weight[kMostSlots];
};

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
                 : "memory");
}

/// total += piece `piece` of a tile.
template <int kEach, bool kHalf>
__device__ __forceinline__ void add_piece(const Stream& s, const ChunkParts& parts, int piece,
                                          const uint8_t* chunk, const uint8_t* x, int lane,
                                          float (&total)[4]) {
    if constexpr (kEach == 0) {
        const int first = piece * s.piece_parts;
        add_parts_of<kHalf>(parts, first, min(first + s.piece_parts, parts.count), chunk, x, lane, total);
    } else {
        x += piece * kPieceChunks * 128;
#pragma unroll(kEach == 1 ? 2 : 1)
        for (int part = 0; part < kPieceChunks / kEach;
             ++part, chunk += kEach * kFp4Chunk, x += kEach * 128) {
            float sum[4] = {};
#pragma unroll
            for (int c = 0; c < kEach; ++c)
                multiply_fp4<kHalf>(chunk + c * kFp4Chunk, x + c * 128, lane, sum);
#pragma unroll
            for (int i = 0; i < 4; i += kHalf ? 2 : 1) total[i] += sum[i];
        }
    }
}

/// Whole block; k.list is complete. kEach: s.each. Work:
///   kRowsFirst              rows are asked for before weights; else weights, before_rows(), rows
///   row(is_shared, index), width(is_shared)   of x
///   weight(is_shared, index)                  a number of its own that a row's results need
///   target(is_shared, index, weight)          where results of a row go
///   store(target, tile, r, low, high, low_factor, high_factor)   sums of rows r and r + 8 of a tile, and
///   their factors
template <int kEach, class Work>
__device__ __forceinline__ void stream_groups(const Work& work, const Stream& s, StreamShared& k,
                                              uint8_t* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    float4* totals = reinterpret_cast<float4*>(memory);  // [warp][lane]
    uint8_t* ring_data = memory + kWarps * 32 * sizeof(float4);
    uint8_t* rows = ring_data + kWarps * s.depth * s.piece_bytes;
    uint8_t* own_ring = ring_data + warp * s.depth * s.piece_bytes;
    auto ring = [&] {
        if constexpr (kEach > 0)
            return WholePieceRing(own_ring, lane);
        else
            return PieceRing(own_ring, k.barriers[warp], s.piece_bytes, s.depth, lane);
    }();
    if (lane == 0) init_barrier(&k.handed[warp]);
    uint32_t handed_parity = 0;
    const TileLine line(s, k.list);
    const int end = line.begin_of(blockIdx.x + 1, gridDim.x);
    int to;
    for (int from = line.begin_of(blockIdx.x, gridDim.x); from < end; from = to) {
        // Groups whose rows fit; first_row, first_pair: of the shared and of the routed ones.
        int next = line.stretch(from, 1).group, shared_rows = 0, slots = 0, first_row = 0, first_pair = 0;
        for (; next < k.list.count && line.first_tile(next) < end &&
               slots + k.list.group[next].count <= s.slots;
             ++next) {
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

        WarpShare ahead(line, from, to, warp), now = ahead;
        const uint8_t* source = nullptr;
        int left = 0, tile_left = 0;  // pieces of the stretch, and of its tile
        int each_bytes = s.piece_bytes, last_bytes = s.piece_bytes, each_pieces = 0;
        const auto next_source = [&] {
            Stretch stretch;
            source = nullptr;
            if (!ahead.next(line, stretch)) return;
            const int expert = k.list.group[stretch.group].expert;
            const StreamWeights w = s.of(expert < 0);
            tile_left = stretch.end - stretch.begin;
            left = (stretch.tile_end - stretch.tile) * tile_left;
            if constexpr (kEach == 0) {
                each_pieces = w.pieces;
                each_bytes = s.piece_parts * w.parts.each * kFp4Chunk;
                last_bytes = stretch.end < w.pieces ? each_bytes : w.tile_bytes - (w.pieces - 1) * each_bytes;
            }
            source = w.data + max(0, expert) * w.expert_bytes +
                     static_cast<int64_t>(stretch.tile) * w.tile_bytes + stretch.begin * each_bytes;
        };
        next_source();
        const auto request = [&] {
            if constexpr (kEach > 0) {
                ring.request(source);
                if (source == nullptr) return;
                source += WholePieceRing::kBytes;
            } else {
                if (source == nullptr) return;
                const int bytes = tile_left > 1 ? each_bytes : last_bytes;
                ring.request(source, bytes);
                source += bytes;
                if (--tile_left == 0) tile_left = each_pieces;
            }
            if (--left == 0) next_source();
        };
        // The first pieces of all warps before the second of any: all begin early.
        request();
        if constexpr (!Work::kRowsFirst) {
#pragma unroll 1
            for (int i = 1; i < s.depth; ++i) request();
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
        if constexpr (Work::kRowsFirst) {
#pragma unroll 1
            for (int i = 1; i < s.depth; ++i) request();
        }

        Stretch stretch;
        while (now.next(line, stretch)) {
            const ExpertGroup group = k.list.group[stretch.group];
            const bool is_shared = group.expert < 0;
            const StreamWeights w = s.of(is_shared);
            const float* factor =
                w.factor + (max(0, static_cast<int>(group.expert)) * w.tiles + stretch.tile) * kTileRows + g;
            const int slot = is_shared ? group.first - first_row : shared_rows + group.first - first_pair;
            // Of up to four rows, row i is columns 2i and 2i + 1 of the products, and the second is not
            // summed.
            const bool half = group.count <= kPassRows / 2;
            const uint8_t* x = rows + (slot + min(half ? g / 2 : g, group.count - 1)) * s.row_bytes + 16 * t;
            const int n =
                half ? t : 2 * t;  // the row whose sums the lane has; without `half` the next one too
            const bool has[2] = {n < group.count, !half && n + 1 < group.count};
            typename Work::Target target[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (has[i]) target[i] = work.target(is_shared, k.index[slot + n + i], k.weight[slot + n + i]);
            for (int tile = stretch.tile; tile < stretch.tile_end; ++tile, factor += kTileRows) {
                const float low_factor = factor[0], high_factor = factor[8];
                float total[4] = {};
                if (stretch.begin > 0) {
                    wait_barrier(&k.handed[warp - 1], handed_parity);
                    handed_parity ^= 1;
                    const float4 v = totals[(warp - 1) * 32 + lane];
                    total[0] = v.x, total[1] = v.y, total[2] = v.z, total[3] = v.w;
                }
                for (int piece = stretch.begin; piece < stretch.end; ++piece) {
                    const uint8_t* chunk = ring.wait();
                    if (half)
                        add_piece<kEach, true>(s, w.parts, piece, chunk, x, lane, total);
                    else
                        add_piece<kEach, false>(s, w.parts, piece, chunk, x, lane, total);
                    ring.release();
                    request();
                }
                if (stretch.end < w.pieces) {
                    totals[warp * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
                    arrive(&k.handed[warp]);
                    continue;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (has[i])
                        work.store(target[i], tile, g, total[i], total[2 + i], low_factor, high_factor);
            }
        }
        if (to < end) __syncthreads();  // rows and totals are done with
    }
}

}  // namespace quern::cuda
