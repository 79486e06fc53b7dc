// All groups of a step times their NVFP4 tiles, in the shares of tile_runs.cuh. A block holds the rows of
// its groups in shared memory; weights come through a ring of each warp's own. A row's bits depend on the row
// only.
//
// Traffic: weights once a group; rows once for each block that has tiles of their group. Limit: instructions
// of the ALU (70 % of its peak at 64 rows) as much as bytes (80 %).
#pragma once

#include "ggml-like/cuda/moe/tile_runs.cuh"
#include "ggml-like/cuda/pack/weight_chunk.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

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

/// What the streams of one kernel keep in static shared memory.
struct StreamShared {
    uint64_t barriers[kWarps][kMaxPieces];
    uint64_t handed[kWarps];
    ExpertGroups list;
    int index[kMaxSlots];  // of a slot: its pair, or its row of the shared expert
    float weight[kMaxSlots];
};

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
                 : "memory");
}

/// total += a whole piece of a tile, whose splits have kEach chunks each. x: the lane's row at the piece, plus
/// 16 t.
template <int kEach, bool kHalf>
__device__ __forceinline__ void add_whole_piece(const uint8_t* chunk, const uint8_t* x, int lane,
                                                float (&total)[4]) {
#pragma unroll(kEach == 1 ? 2 : 1)
    for (int split = 0; split < kPieceChunks / kEach; ++split, chunk += kEach * kFp4Chunk, x += kEach * 128) {
        float sum[4] = {};
#pragma unroll
        for (int c = 0; c < kEach; ++c) multiply_fp4<kHalf>(chunk + c * kFp4Chunk, x + c * 128, lane, sum);
#pragma unroll
        for (int i = 0; i < 4; i += kHalf ? 2 : 1) total[i] += sum[i];
    }
}

/// total += chunks [first, last) of a tile, in one chain of products with scaled weights: the sums of prompts (gemm.h).
__device__ __forceinline__ void add_chunks_in_chain(const uint8_t* chunk, const uint8_t* x, int chunks,
                                                    int lane, float (&total)[4]) {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, chunk += kFp4Chunk, x += 128) {
        WeightChunk<Kind::nvfp4> weights;
        weights.load(chunk, lane);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint4 v = *reinterpret_cast<const uint4*>(x + 64 * j);
            uint32_t a[4];
            weights.fragment(2 * j, a);
            mma(total, a, v.x, v.y);
            weights.fragment(2 * j + 1, a);
            mma(total, a, v.z, v.w);
        }
    }
}
/// The same for piece `piece`.
template <int kEach>
__device__ __forceinline__ void add_piece_in_chain(const Stream& s, const ColumnSplits& splits, int piece,
                                                   const uint8_t* chunk, const uint8_t* x, int lane,
                                                   float (&total)[4]) {
    if constexpr (kEach == 0) {
        const int first = piece * s.piece_splits, last = min(first + s.piece_splits, splits.count) - 1;
        const int begin = splits.begin(first);
        add_chunks_in_chain(chunk, x + begin * 128, splits.end(last) - begin, lane, total);
    } else {
        add_chunks_in_chain(chunk, x + piece * kPieceChunks * 128, kPieceChunks, lane, total);
    }
}

/// total += piece `piece` of a tile.
template <int kEach, bool kHalf>
__device__ __forceinline__ void add_piece(const Stream& s, const ColumnSplits& splits, int piece,
                                          const uint8_t* chunk, const uint8_t* x, int lane,
                                          float (&total)[4]) {
    if constexpr (kEach == 0) {
        const int first = piece * s.piece_splits;
        add_splits_of<kHalf>(splits, first, min(first + s.piece_splits, splits.count), chunk, x, lane, total);
    } else {
        add_whole_piece<kEach, kHalf>(chunk, x + piece * kPieceChunks * 128, lane, total);
    }
}

/// The rows of x that a block holds at a time: of the shared expert's groups, then of routed ones.
struct HeldRows {
    int shared_rows = 0, slots = 0;
    int first_row = 0, first_pair = 0;  // the first of each
    int next_group;                     // whose rows do not fit or are not needed

    __device__ __forceinline__ HeldRows(const ExpertGroups& list, const TileLine& line, int from, int end)
        : next_group(line.run(from, 1).group) {
        for (; next_group < list.count && line.first_tile(next_group) < end; ++next_group) {
            const ExpertGroup group = list.group[next_group];
            if (slots + group.count > line.s.slots) break;
            if (slots == 0) first_row = group.first;
            if (slots == shared_rows) first_pair = group.first;
            slots += group.count;
            if (group.expert < 0) shared_rows = slots;
        }
    }
    __device__ __forceinline__ bool is_shared(int slot) const { return slot < shared_rows; }
    /// A slot's pair, or row of the shared expert.
    __device__ __forceinline__ int index(const ExpertGroups& list, int slot) const {
        return is_shared(slot) ? first_row + slot : list.pair[first_pair + slot - shared_rows];
    }
    __device__ __forceinline__ int slot_of(const ExpertGroup& group) const {
        return group.expert < 0 ? group.first - first_row : shared_rows + group.first - first_pair;
    }
};

/// Brings held rows into shared memory, 16 numbers a thread at a time; the first of them while something else
/// goes on.
template <class Work>
struct RowLoads {
    static constexpr int kEarly = 2;
    const Work& work;
    const HeldRows& held;
    const ExpertGroups& list;
    uint8_t* rows;
    int row_bytes;
    Divisor blocks;  // 16 numbers are a block; of a row
    Fp4Block early[kEarly];

    __device__ __forceinline__ RowLoads(const Work& w, const HeldRows& h, const ExpertGroups& l, uint8_t* r,
                                        int bytes)
        : work(w), held(h), list(l), rows(r), row_bytes(bytes), blocks(bytes / 32) {}
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < kEarly; ++i) load(early[i], threadIdx.x + i * kThreads);
    }
    __device__ __forceinline__ void end() const {
#pragma unroll
        for (int i = 0; i < kEarly; ++i) store(early[i], threadIdx.x + i * kThreads);
#pragma unroll 2
        for (int b = threadIdx.x + kEarly * kThreads; b < held.slots * blocks.by(); b += kThreads) {
            Fp4Block block;
            load(block, b);
            store(block, b);
        }
    }

  private:
    __device__ __forceinline__ void load(Fp4Block& block, int b) const {
        const int slot = blocks.quotient(b), column = (b - slot * blocks.by()) * 16;
        if (slot >= held.slots) return;
        const bool shared = held.is_shared(slot);
        if (column < work.width(shared)) block.load(work.row(shared, held.index(list, slot)) + column);
    }
    __device__ __forceinline__ void store(const Fp4Block& block, int b) const {
        const int slot = blocks.quotient(b);
        if (slot < held.slots)
            block.template store<!Work::kPrompt>(rows + slot * row_bytes, b - slot * blocks.by());
    }
};

/// Asks for a warp's pieces one after the other.
template <int kEach>
struct PieceRequests {
    const Stream& s;
    const TileLine& line;
    const ExpertGroups& list;
    WarpRuns runs;
    const uint8_t* source = nullptr;  // null: all have been asked for
    int left = 0, tile_left = 0;      // pieces of the run, and of its tile
    int each_bytes, last_bytes, each_pieces;

    __device__ __forceinline__ PieceRequests(const TileLine& tiles, const ExpertGroups& groups,
                                             const WarpRuns& own)
        : s(tiles.s), line(tiles), list(groups), runs(own), each_bytes(s.piece_bytes) {
        find_source();
    }
    template <class Ring>
    __device__ __forceinline__ void next(Ring& ring) {
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
        if (--left == 0) find_source();
    }

  private:
    __device__ __forceinline__ void find_source() {
        TileRun run;
        source = nullptr;
        if (!runs.next(line, run)) return;
        const int expert = list.group[run.group].expert;
        const StreamWeights w = s.of(expert < 0);
        tile_left = run.end - run.begin;
        left = (run.tile_end - run.tile) * tile_left;
        if constexpr (kEach == 0) {
            each_pieces = w.pieces;
            each_bytes = s.piece_splits * w.splits.each * kFp4Chunk;
            last_bytes = run.end < w.pieces ? each_bytes : w.tile_bytes - (w.pieces - 1) * each_bytes;
        }
        source = w.data + max(0, expert) * w.expert_bytes + static_cast<int64_t>(run.tile) * w.tile_bytes +
                 run.begin * each_bytes;
    }
};

/// One warp's runs of its block's tiles times the held rows. totals [warp][lane]: for the next warp.
template <int kEach, class Work, class Ring>
__device__ __forceinline__ void multiply_share(const Work& work, const TileLine& line, StreamShared& k,
                                               const HeldRows& held, const uint8_t* rows, float4* totals,
                                               WarpRuns runs, PieceRequests<kEach>& requests, Ring& ring,
                                               uint32_t& handed_parity) {
    const Stream& s = line.s;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    TileRun run;
    while (runs.next(line, run)) {
        const ExpertGroup group = k.list.group[run.group];
        const bool is_shared = group.expert < 0;
        const StreamWeights w = s.of(is_shared);
        const float* factor =
            w.factor + (max(0, static_cast<int>(group.expert)) * w.tiles + run.tile) * kTileRows + g;
        const int slot = held.slot_of(group);
        // Of up to four rows, row i is columns 2i and 2i + 1 of the products, and the second is not summed.
        const bool half = group.count <= kPassRows / 2;
        const uint8_t* x = rows + (slot + min(half ? g / 2 : g, group.count - 1)) * s.row_bytes + 16 * t;
        const int n = half ? t : 2 * t;  // the row whose sums the lane has; without `half` the next one too
        const bool has[2] = {n < group.count, !half && n + 1 < group.count};
        typename Work::Target target[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (has[i]) target[i] = work.target(is_shared, k.index[slot + n + i], k.weight[slot + n + i]);
        for (int tile = run.tile; tile < run.tile_end; ++tile, factor += kTileRows) {
            const float low_factor = factor[0], high_factor = factor[8];
            float total[4] = {};
            if (run.begin > 0) {
                wait_barrier(&k.handed[warp - 1], handed_parity);
                handed_parity ^= 1;
                const float4 v = totals[(warp - 1) * 32 + lane];
                total[0] = v.x, total[1] = v.y, total[2] = v.z, total[3] = v.w;
            }
            for (int piece = run.begin; piece < run.end; ++piece) {
                const uint8_t* chunk = ring.wait();
                if constexpr (Work::kPrompt)
                    add_piece_in_chain<kEach>(s, w.splits, piece, chunk, x, lane, total);
                else if (half)
                    add_piece<kEach, true>(s, w.splits, piece, chunk, x, lane, total);
                else
                    add_piece<kEach, false>(s, w.splits, piece, chunk, x, lane, total);
                ring.release();
                requests.next(ring);
            }
            if (run.end < w.pieces) {
                totals[warp * 32 + lane] = make_float4(total[0], total[1], total[2], total[3]);
                arrive(&k.handed[warp]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (has[i]) work.store(target[i], tile, g, total[i], total[2 + i], low_factor, high_factor);
        }
    }
}

/// Whole block; k.list is complete. kEach: s.each. Work:
///   kPrompt                 sums as gemm.h has them
///   kRowsFirst              rows are asked for before weights; else weights, before_rows(), rows
///   row(is_shared, index), width(is_shared)   of x
///   weight(is_shared, index)                  a number of its own that a row's results need
///   target(is_shared, index, weight)          where results of a row go
///   store(target, tile, r, low, high, low_factor, high_factor)
///                           sums of rows r and r + 8 of a tile, and their factors
template <int kEach, class Work>
__device__ __forceinline__ void stream_groups(const Work& work, const Stream& s, StreamShared& k,
                                              uint8_t* memory) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
        const HeldRows held(k.list, line, from, end);
        to = min(end, line.first_tile(held.next_group));
        RowLoads<Work> loads(work, held, k.list, rows, s.row_bytes);
        if constexpr (Work::kRowsFirst) loads.begin();
        const int slot = threadIdx.x;
        if (slot < held.slots) {
            k.index[slot] = held.index(k.list, slot);
            k.weight[slot] = work.weight(held.is_shared(slot), k.index[slot]);
        }
        const WarpRuns runs(line, from, to, warp);
        PieceRequests<kEach> requests(line, k.list, runs);
        // The first pieces of all warps before the second of any: all begin early.
        requests.next(ring);
        const auto ask_for_rest = [&] {
#pragma unroll 1
            for (int i = 1; i < s.depth; ++i) requests.next(ring);
        };
        if constexpr (!Work::kRowsFirst) {
            ask_for_rest();
            work.before_rows();
            loads.begin();
        }
        loads.end();
        __syncthreads();
        if constexpr (Work::kRowsFirst) ask_for_rest();
        multiply_share<kEach>(work, line, k, held, rows, totals, runs, requests, ring, handed_parity);
        if (to < end) __syncthreads();  // rows and totals are done with
    }
}

}  // namespace quern::cuda::moe
