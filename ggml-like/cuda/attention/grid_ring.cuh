// Attention among patches by products of warpgroups: a block's shared memory, and the warps that copy.
//
//   q            [warpgroup][10 pieces][64 rows][8]      10 KB each
//   ring         K or V of 128 keys: [10][128][8]        20 KB each; the last piece stays zeros, V has no use for it
//   order        K0  K1 V0  K2 V1  ...  Kn Vn-1  Vn
//
// One lane copies K and V; it also finds the block's spans, one after another, and tells the other warps. Three warps more copy
// queries, one for each warpgroup: those of the next span come while the last values of this one are added.
#pragma once

#include "ggml-like/cuda/attention/grid_attention.h"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"
#include "ggml-like/cuda/ptx/wgmma_pieces.cuh"

#if QUERN_WGMMA

namespace quern::cuda::attention::grid {

using namespace ptx;

constexpr int kThreads = kGridGroups * 128, kTileRows = kGridGroups * kGridQueries;
constexpr int kKeyPiece = kGridKeys * 16, kQueryPiece = kGridQueries * 16;  // bytes

/// Queries of a block, `first` to `last` - 1, their head, and the frame that they look at.
struct Span {
    int head, first, last, begin, end;

    __device__ __forceinline__ int keys() const { return end - begin; }
};

/// Which spans a block has: every so many of all, heads one after the other.
struct Schedule {
    const GridCall& c;
    int tiles = 0;  // of a head

    __device__ __forceinline__ explicit Schedule(const GridCall& call) : c(call) {
        for (int f = 0; f < c.frames; ++f) tiles += tiles_of(f);
    }
    __device__ __forceinline__ int first_of(int frame) const { return max(c.start[frame], c.query); }
    __device__ __forceinline__ int last_of(int frame) const {
        return min(c.start[frame + 1], c.query + c.queries);
    }
    __device__ __forceinline__ int tiles_of(int frame) const {
        return max(last_of(frame) - first_of(frame) + kTileRows - 1, 0) / kTileRows;
    }
    /// False: there are no more.
    __device__ __forceinline__ bool find(int round, Span& span) const {
        const int index = round * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
        if (index >= tiles * c.heads) return false;
        int tile = index % tiles, frame = 0;
        for (; tile >= tiles_of(frame); ++frame) tile -= tiles_of(frame);
        span.head = index / tiles, span.begin = c.start[frame], span.end = c.start[frame + 1];
        span.first = first_of(frame) + tile * kTileRows, span.last = last_of(frame);
        return true;
    }
};

/// A place in the ring, as one number: registers are scarce.
struct Place {
    uint32_t count = 0;

    __device__ __forceinline__ int slot() const { return static_cast<int>(count % kGridSlots); }
    __device__ __forceinline__ uint32_t phase() const { return count / kGridSlots & 1; }
    __device__ __forceinline__ void go_on() { ++count; }
};

/// Static shared memory. Each span passes two slots at least, so that no warp is more than kGridSlots / 2 spans behind another.
struct Barriers {
    static constexpr int kSpans = 8;
    uint64_t full[kGridSlots], empty[kGridSlots], told[kSpans];
    uint64_t queries_full[kGridGroups], queries_empty[kGridGroups];
    Span span[kSpans];
};

struct Ring {
    const GridCall& c;
    char* shared;
    Barriers* barriers;

    /// `unaligned`: kGridShared bytes.
    __device__ __forceinline__ Ring(const GridCall& call, char* unaligned, Barriers* b)
        : c(call), shared(unaligned + (128 - shared_address(unaligned) % 128) % 128), barriers(b) {}

    __device__ __forceinline__ char* queries(int group) const { return shared + group * kGridQueryBytes; }
    __device__ __forceinline__ char* slot(const Place& at) const {
        return shared + kGridGroups * kGridQueryBytes + at.slot() * kGridSlotBytes;
    }

    /// All threads of the block: barriers, and the zeros behind q and K.
    __device__ __forceinline__ void init() const {
        const int thread = threadIdx.x;
        if (thread < kGridSlots) {
            init_phases(barriers->full + thread, 1);
            init_phases(barriers->empty + thread, kThreads / 32);
        }
        if (thread < Barriers::kSpans) init_phases(barriers->told + thread, 1);
        if (thread < kGridGroups) {
            init_phases(barriers->queries_full + thread, 32);
            init_phases(barriers->queries_empty + thread, 4);
        }
        publish_phases();
        for (int i = thread; i < kGridSlots * kGridKeys; i += blockDim.x)
            *reinterpret_cast<uint4*>(slot({static_cast<uint32_t>(i) / kGridKeys}) + kGridPieces * kKeyPiece +
                                      i % kGridKeys * 16) = uint4{};
        for (int i = thread; i < kTileRows; i += blockDim.x)
            *reinterpret_cast<uint4*>(queries(i / kGridQueries) + kGridPieces * kQueryPiece +
                                      i % kGridQueries * 16) = uint4{};
        fence_async_proxy();
    }

    __device__ __forceinline__ void wait_full(const Place& at) const {
        wait_phase(barriers->full + at.slot(), at.phase());
    }
    /// Every warp that multiplies: the slot may be written.
    __device__ __forceinline__ void release(const Place& at) const {
        if (threadIdx.x % 32 == 0) arrive(barriers->empty + at.slot());
    }
    __device__ __forceinline__ void wait_queries(int group, int round) const {
        wait_phase(barriers->queries_full + group, round & 1);
    }
    __device__ __forceinline__ void release_queries(int group) const {
        if (threadIdx.x % 32 == 0) arrive(barriers->queries_empty + group);
    }

    /// The block's span number `round`; one of no keys: there are no more.
    __device__ __forceinline__ void tell(int round, const Span& span) const {
        barriers->span[round % Barriers::kSpans] = span;
        arrive(barriers->told + round % Barriers::kSpans);
    }
    __device__ __forceinline__ const Span& span(int round) const {
        return barriers->span[round % Barriers::kSpans];
    }
    __device__ __forceinline__ const Span& told(int round) const {
        wait_phase(barriers->told + round % Barriers::kSpans, round / Barriers::kSpans & 1);
        return span(round);
    }

    /// One lane: rows of all pieces from `from` on, `apart` elements from each other, to the next slot.
    __device__ __forceinline__ void copy_rows(Place& at, const bf16* from, int64_t apart, int rows) const {
        wait_phase(barriers->empty + at.slot(),
                   at.phase() ^ 1);  // at first: a phase before the first has ended
        uint64_t* full = barriers->full + at.slot();
        arrive_and_expect(full, kGridPieces * rows * 16);
#pragma unroll
        for (int i = 0; i < kGridPieces; ++i)
            copy_bytes(slot(at) + i * kKeyPiece, from + i * apart, rows * 16, full);
        at.go_on();
    }
    __device__ __forceinline__ void copy_span(Place& at, const Span& span) const {
        const int64_t apart = static_cast<int64_t>(c.rows) * 8;
        const bf16* k = c.work + span.head * kGridPieces * apart + span.begin * 8;
        const bf16* v = k + c.heads * kGridPieces * apart;
        const int keys = span.keys(), steps = (keys + kGridKeys - 1) / kGridKeys;
        const auto copy_step = [&](const bf16* from, int step) {
            copy_rows(at, from + step * (kGridKeys * 8), apart, min(keys - step * kGridKeys, kGridKeys));
        };
#pragma unroll 1
        for (int i = 0; i <= steps; ++i) {
            if (i < steps) copy_step(k, i);
            if (i > 0) copy_step(v, i - 1);
        }
    }
    /// One lane: finds the block's spans, tells them, and copies K and V of each.
    __device__ __forceinline__ void copy_spans() const {
        const Schedule schedule(c);
        Place at;
        Span span{};
        bool more = true;
#pragma unroll 1
        for (int round = 0; more; ++round) {
            more = schedule.find(round, span);
            if (!more) span.begin = span.end;
            tell(round, span);
            if (more) copy_span(at, span);
        }
    }

    /// A warp: a warpgroup's queries of each span, rotated, which wait in y; zeros where there are none.
    __device__ __forceinline__ void copy_queries(int group) const {
#pragma unroll 1
        for (int round = 0;; ++round) {
            const Span span = told(round);
            if (span.keys() == 0) return;
            const int first = span.first + group * kGridQueries;
            wait_phase(barriers->queries_empty + group, (round & 1) ^ 1);
#pragma unroll 2
            for (int i = threadIdx.x % 32; i < kGridQueries * kGridPieces; i += 32) {
                const int row = i / kGridPieces, piece = i % kGridPieces;
                const bool valid = first + row < span.last;
                const int64_t from =
                    (static_cast<int64_t>(first + row - c.query) * c.heads + span.head) * kGridWidth +
                    piece * 8;
                copy_async16(queries(group) + piece * kQueryPiece + row * 16, c.y + (valid ? from : 0),
                             valid);
            }
            commit_copies();
            wait_copies<0>();
            fence_async_proxy();
            arrive(barriers->queries_full + group);
        }
    }
};

}  // namespace quern::cuda::attention::grid

#endif
