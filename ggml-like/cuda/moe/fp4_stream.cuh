// The stream: all groups of a step (expert_groups.cuh) times their NVFP4 tiles, shared out evenly over blocks and warps
// (tile_runs.cuh).
//
//   all tiles   | block 0            | block 1            | block 2 ...    tiles of group after group
//   a block     | warp 0 | warp 1 | ... | warp 15 |                        runs of tiles, of equal numbers of pieces
//   a warp      piece after piece: 16 rows of weights x 256 columns, times the group's up to 8 rows of x
//
//   A block that has tiles of more rows than it can hold takes several rounds. A tile that two warps share is begun by
//   the first warp, as its first work, and ended by the next one, as its last; the sums so far go through `totals`.
//
// Shared memory: totals (8 KB), a ring of pieces a warp (3 pieces of 2.25 KB: 108 KB), rows of x (up to 24).
//
// A row's bits depend on that row alone: sums have the order of piece_sums.cuh, whoever makes them.
//
// Traffic: weights once a group; rows once for each block that has tiles of their group. Bound: instructions of the ALU
// as much as bytes. With 64 rows gate and up take 76 us for 264 MB, 82 % of the memory's speed, with the ALU pipe at 70
// % of its peak and the issue slots at 74 %; the busiest SM works 6 to 8 % longer than the mean (ncu, H200, 2026-11).
#pragma once

#include "ggml-like/cuda/moe/held_rows.cuh"
#include "ggml-like/cuda/moe/piece_sums.cuh"

#include "ggml-like/cuda/moe/tile_runs.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// What the stream keeps in static shared memory.
struct StreamShared {
    uint64_t barriers[kWarps][kMaxPieces];
    uint64_t handed[kWarps];  // the warp has left the sums of a shared tile in `totals`
    ExpertGroups list;
    int target[kMaxSlots];    // of a slot: what Work::target is given
    float weight[kMaxSlots];  // of a slot: Work::weight
};

__device__ __forceinline__ void arrive(uint64_t* barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
                 : "memory");
}

/// Asks for a warp's pieces one after the other.
template <int kEach>
struct PieceRequests {
    const Stream& s;
    const TileLine& line;
    const ExpertGroups& list;
    WarpRuns runs;
    const uint8_t* source = nullptr;  // of the next piece; null: all have been asked for
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

/// One warp's runs of tiles times the held rows. totals: [warp][lane], for the next warp.
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
        // With up to four rows, row i is columns 2i and 2i + 1 of the products, and only the first is summed.
        const bool half = group.count <= kPassRows / 2;
        const uint8_t* x = rows + (slot + min(half ? g / 2 : g, group.count - 1)) * s.row_bytes + 16 * t;
        const int n = half ? t : 2 * t;  // the row whose sums the lane has; without `half` also the next
        const bool has[2] = {n < group.count, !half && n + 1 < group.count};
        typename Work::Target target[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (has[i]) target[i] = work.target(is_shared, k.target[slot + n + i], k.weight[slot + n + i]);
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

/// The whole block; k.list is complete. kEach: chunks of a split, or 0 unless s.whole. Work, where `index` is a pair, or a row for the shared expert:
///   kLate                              blocks begin one after the other (share_begin)
///   kPrompt                            sums as prompts add (gemm.h), else as answers
///   kRowsFirst                         rows are requested before weights; else weights, then before_rows(), then rows
///   kRowsAtPlaces, kTargetsAtPlaces    row(), target() are given the pair's place in groups instead of the pair
///   row(is_shared, index)              the row of x
///   width(is_shared)                   its columns
///   weight(is_shared, index)           a number that the row's results need
///   target(is_shared, index, weight)   where the row's results go
///   store(target, tile, r, low, high, low_factor, high_factor)
///                                      takes the sums of rows r and r + 8 of a tile, and these rows' factors
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
            return WholePieceRing(own_ring, k.barriers[warp], lane);
        else
            return PieceRing(own_ring, k.barriers[warp], s.piece_bytes, s.depth, lane);
    }();
    if (lane == 0) init_barrier(&k.handed[warp]);
    uint32_t handed_parity = 0;
    const TileLine line(s, k.list);
    const int end = line.begin_of<Work::kPrompt, Work::kLate>(blockIdx.x + 1, gridDim.x);
    int to;
    for (int from = line.begin_of<Work::kPrompt, Work::kLate>(blockIdx.x, gridDim.x); from < end; from = to) {
        const HeldRows held(k.list, line, from, end);
        to = min(end, line.first_tile(held.next_group));
        RowLoads<Work> loads(work, held, k.list, rows, s.row_bytes);
        if constexpr (Work::kRowsFirst) loads.begin();
        const int slot = threadIdx.x;
        if (slot < held.slots) {
            const int index = held.index(k.list, slot);
            k.target[slot] = Work::kTargetsAtPlaces ? held.place(slot) : index;
            k.weight[slot] = work.weight(held.is_shared(slot), index);
        }
        const WarpRuns runs(line, from, to, warp);
        PieceRequests<kEach> requests(line, k.list, runs);
        // The first piece of every warp is requested before the second of any, so that all begin early.
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
        if (to < end) __syncthreads();  // all are done with rows and totals
    }
}

}  // namespace quern::cuda::moe
