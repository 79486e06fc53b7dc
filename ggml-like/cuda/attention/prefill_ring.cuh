// Attention of prompt rows by products of warpgroups: a block's shared memory, and the warp that copies.
//
//   q, later the gates      [warpgroup][4][64 rows][64 columns]   64 KB
//   ring of five slots      K or V of a page: [4][64 keys][64 columns]   32 KB each
//
//   order of a segment      K0  K1 V0  K2 V1  ...  Kn Vn-1  Vn
//
// 64 columns of BF16 are the 128 bytes that the copy engine swizzles. One lane copies; it also finds the block's spans, one
// after another, and tells the warps that multiply, so that these need not wait for the loads that this takes.
#pragma once

#include "ggml-like/cuda/attention/prefill_segments.cuh"
#include "ggml-like/cuda/attention/unpacked.cuh"
#include "ggml-like/cuda/ptx/wgmma.cuh"

#if QUERN_WGMMA

namespace quern::cuda::attention::prefill {

using namespace ptx;

constexpr int kColumns = 64, kColumnBytes = 64 * kColumns * 2;  // of 64 rows
constexpr int kQueryBytes = kRows * kDim * 2, kSlotBytes = kKeysPerPage * kDim * 2;
constexpr int kPlainSlots = 5, kPackedSlots = 4;
constexpr int kSegmentPages = kSegmentKeys / kKeysPerPage;
static_assert(kWarpgroupShared == 1024 + kQueryBytes + kPlainSlots * kSlotBytes);

/// Pages begin .. end-1 of the keys of a tile. `keys`: that its last row sees.
struct Span {
    Tile tile;
    int keys, begin, end;
    int sharers;         // blocks that share the tile; 1: it is whole
    int number, shared;  // which of the shared tiles it is, and how many these are
};

/// K and V of a span's pages in the order of the ring: item(whether V, page * G + KV head).
template <class F>
__device__ __forceinline__ void walk(const AttentionCall& c, const Span& span, const F& item) {
    const PageTable pages(c, span.tile.sequence);
    int next = pages.at(span.begin), head = 0;
    for (int begin = span.begin; begin < span.end; begin += kSegmentPages) {
        const int end = min(begin + kSegmentPages, span.end);
#pragma unroll 1
        for (int page = begin; page <= end; ++page) {
            const int head_before = head;
            if (page < end) {
                head = next * c.kv_heads + span.tile.kv_head;
                next = pages.at(min(page + 1, span.end - 1));
                item(false, head);
            }
            if (page > begin) item(true, head_before);
        }
    }
}

/// A place in the ring.
template <int kSlots>
struct Place {
    int slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void go_on() {
        if (++slot == kSlots) slot = 0, phase ^= 1;
    }
};

/// Static shared memory. Each span passes K and V through the ring, so that of the last eight that are told four have been read.
struct Barriers {
    static constexpr int kSpans = 8;
    uint64_t full[kPlainSlots], empty[kPlainSlots], told[kSpans];
    Span span[kSpans];
};

template <int kSlots>
struct Ring {
    using Place = prefill::Place<kSlots>;

    char* queries;
    Barriers* barriers;

    /// `unaligned`: kWarpgroupShared bytes.
    __device__ __forceinline__ Ring(char* unaligned, Barriers* b)
        : queries(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024), barriers(b) {}

    /// `fillers`: who arrives when a slot is full.
    __device__ __forceinline__ void init(int fillers) const {
        if (threadIdx.x < kSlots) {
            init_phases(barriers->full + threadIdx.x, fillers);
            init_phases(barriers->empty + threadIdx.x, kWarps);
        }
        if (threadIdx.x < Barriers::kSpans) init_phases(barriers->told + threadIdx.x, 1);
        publish_phases();
    }
    __device__ __forceinline__ char* slot(const Place& at) const {
        return queries + kQueryBytes + at.slot * kSlotBytes;
    }
    __device__ __forceinline__ void wait_full(const Place& at) const {
        wait_phase(barriers->full + at.slot, at.phase);
    }
    /// Every warp that multiplies: the slot may be written.
    __device__ __forceinline__ void release(const Place& at) const {
        if (threadIdx.x % 32 == 0) arrive(barriers->empty + at.slot);
    }
    /// The block's span number `index`.
    __device__ __forceinline__ void tell(int index, const Span& span) const {
        barriers->span[index % Barriers::kSpans] = span;
        arrive(barriers->told + index % Barriers::kSpans);
    }
    __device__ __forceinline__ const Span& told(int index) const {
        wait_phase(barriers->told + index % Barriers::kSpans, index / Barriers::kSpans & 1);
        return barriers->span[index % Barriers::kSpans];
    }

    /// One lane: K or V of a page, from this row of the cache on, to the next slot.
    __device__ __forceinline__ void copy_page(Place& at, const CUtensorMap& map, int row) const {
        wait_phase(barriers->empty + at.slot, at.phase ^ 1);  // at first: a phase before the first has ended
        uint64_t* full = barriers->full + at.slot;
        arrive_and_expect(full, kSlotBytes);
#pragma unroll
        for (int i = 0; i < kDim / kColumns; ++i)
            copy_box(slot(at) + i * kColumnBytes, map, i * kColumns, row, full);
        at.go_on();
    }
    __device__ __forceinline__ void copy_span(const AttentionCall& c, Place& at, const CUtensorMap& k,
                                              const CUtensorMap& v, const Span& span) const {
        walk(c, span, [&](bool values, int head) { copy_page(at, values ? v : k, head * kKeysPerPage); });
    }
};

}  // namespace quern::cuda::attention::prefill

#endif
