// Attention of prompt rows by products of warpgroups over packed caches: four warps beside those that multiply.
//
//   unit     half a page of K or V, as it is packed: 32 rows of codes, of scales of 16, of rows' scales; the copy engine brings
//            as many as there are places for, which take the memory of the ring's fifth slot
//   warp     of every unit 8 rows, a row four lanes, which take turns with its 16-byte pieces of codes; expands them to BF16 in
//            the ring's slots, in the swizzled form that the copy engine would leave. Every fourth unit it asks for another one
//
// Lanes that read or store together have eight rows and, of these, pieces that are in different banks.
#pragma once

#include "ggml-like/cuda/attention/packed.cuh"
#include "ggml-like/cuda/attention/prefill_ring.cuh"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"

#if QUERN_WGMMA

namespace quern::cuda::attention::prefill {

using namespace ptx;
using kv::Packing;

constexpr int kExpanders = 4, kPlaces = 8, kUnitRows = kKeysPerPage / 2;
static_assert(kPackedWarpgroupShared == 1024 + kQueryBytes + kPackedSlots * kSlotBytes + kUnitsBytes);

/// K or V of which page of a span is item `number`, in the order of the ring.
struct Item {
    bool values;
    int page;

    __device__ __forceinline__ Item(int number, int pages) {
        const int begin = number / (2 * kSegmentPages) * kSegmentPages, i = number % (2 * kSegmentPages);
        const int count = min(kSegmentPages, pages - begin);
        const bool last = i + 1 == 2 * count;
        values = last || (i > 0 && i % 2 == 0);
        page = begin + (last ? count - 1 : values ? i / 2 - 1 : (i + 1) / 2);
    }
};

/// Static shared memory.
struct UnitBarriers {
    uint64_t full[kPlaces], empty[kPlaces];
};

/// Where a unit is staged.
struct Staged {
    int place = 0;
    uint32_t phase = 0;

    /// `by`: at most `places`.
    __device__ __forceinline__ void go_on(int by, int places) {
        place += by;
        if (place >= places) place -= places, phase ^= 1;
    }
};

/// One side of the caches.
struct Side {
    Packing packing;
    packed::Block block;
    const char* cache;

    __device__ __forceinline__ Side(const AttentionCall& c, bool values)
        : packing(values ? c.v_packing : c.k_packing),
          block(values ? c.v_layout : c.k_layout),
          cache(reinterpret_cast<const char*>(values ? c.v_cache : c.k_cache)) {}
    __device__ __forceinline__ int unit_bytes() const { return block.bytes / 2; }
};

/// The lane's row of a unit and its pieces. Made anew wherever it is needed: what is kept of it over the loop takes registers
/// that are not there.
struct Lane {
    int thread;

    __device__ __forceinline__ Lane() : thread(static_cast<int>(threadIdx.x) - kThreads) {
        asm volatile("" : "+r"(thread));
    }
    __device__ __forceinline__ int row() const { return thread / 32 * 8 + thread % 8; }
    /// Of every four pieces the lane's.
    __device__ __forceinline__ int piece() const { return (thread / 8 ^ thread) & 3; }
};

/// What a lane has of a unit: its row's scale or scales, up to four pieces of codes, of nvfp4 the two scales of each piece.
struct Pieces {
    uint4 codes[4];
    uint32_t of16[2];
    uint32_t scale;
};

struct Expander {
    using Ring = prefill::Ring<kPackedSlots>;

    const AttentionCall& c;
    const Ring& ring;
    UnitBarriers* barriers;
    int thread, places;

    __device__ __forceinline__ Expander(const AttentionCall& call, const Ring& to, UnitBarriers* b)
        : c(call), ring(to), barriers(b), thread(static_cast<int>(threadIdx.x) - kThreads) {
        const int most = max(Side(c, false).unit_bytes(), Side(c, true).unit_bytes());
        places = min(kPlaces, quotient(kUnitsBytes, most));
    }
    __device__ __forceinline__ void init() const {
        const int i = threadIdx.x;
        if (i < kPlaces) init_phases(barriers->full + i, 1), init_phases(barriers->empty + i, kExpanders);
    }
    __device__ __forceinline__ char* unit(int place) const {
        const int most = max(Side(c, false).unit_bytes(), Side(c, true).unit_bytes());
        return ring.queries + kQueryBytes + kPackedSlots * kSlotBytes + place * most;
    }

    /// One lane: half of K or V of a page to a place, once that is free.
    __device__ __forceinline__ void copy(bool values, int head, int half, const Staged& to) const {
        const Side s(c, values);
        const char* block = s.cache + static_cast<int64_t>(head) * s.block.bytes;
        char* place = unit(to.place);
        uint64_t* full = barriers->full + to.place;
        wait_phase(barriers->empty + to.place, to.phase ^ 1);
        arrive_and_expect(full, s.unit_bytes());
        const int codes = kUnitRows * s.block.codes, blocks = kUnitRows * s.block.blocks,
                  scales = kUnitRows * s.block.scales;
        copy_bytes(place, block + half * codes, codes, full);
        if (blocks > 0) copy_bytes(place + codes, block + s.block.blocks_at + half * blocks, blocks, full);
        copy_bytes(place + codes + blocks, block + s.block.scales_at + half * scales, scales, full);
    }

    __device__ __forceinline__ static void load(const Side& s, const char* from, Pieces& p) {
        const Lane lane;
        const int r = lane.row();
        const char* codes = from + r * s.block.codes + lane.piece() * 16;
        const char* of16 = from + kUnitRows * s.block.codes + r * s.block.blocks + lane.piece() * 2;
        const char* scales = from + kUnitRows * (s.block.codes + s.block.blocks) + r * s.block.scales;
        p.scale = *reinterpret_cast<const uint16_t*>(scales);
        if (s.packing == Packing::steps)
            p.scale |= uint32_t{*reinterpret_cast<const uint16_t*>(scales + 2)} << 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            p.codes[i] = *reinterpret_cast<const uint4*>(codes + i * 64);
            if (s.packing == Packing::nvfp4) p.of16[i] = *reinterpret_cast<const uint16_t*>(of16 + i * 8);
        }
        if (s.packing == Packing::fp8)
#pragma unroll
            for (int i = 2; i < 4; ++i) p.codes[i] = *reinterpret_cast<const uint4*>(codes + i * 64);
    }

    // Eight elements: 16-byte piece p of row r of a slot lies at p ^ (r % 8), as copy_box would leave it. The lane's pieces of
    // codes are four apart, so 64 columns apart in fp8, 128 in 4 bits.

    __device__ __forceinline__ static void put(uint32_t at, int columns, const uint4& x) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at + columns / kColumns * kColumnBytes),
                     "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
    }
    __device__ __forceinline__ static void expand(Packing packing, const Pieces& p, uint32_t half) {
        const Lane lane;
        const int r = lane.row(), piece = lane.piece();
        if (packing == Packing::fp8) {
            const uint32_t at = half + r * 128 + (((2 * piece ^ r) & 7) << 4);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                packed::expand_piece(Packing::fp8, p.codes[i], p.scale, 0,
                                     [&](int j, const uint4& x) { put(at ^ j << 4, 64 * i, x); });
            return;
        }
        const uint32_t at = half + r * 128 + piece / 2 * kColumnBytes + (((4 * piece ^ r) & 7) << 4);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            packed::expand_piece(packing, p.codes[i], p.scale, p.of16[i],
                                 [&](int j, const uint4& x) { put(at ^ j << 4, 128 * i, x); });
    }

    /// The units that the warp asks for: every kExpanders-th of a span. The next one's page is loaded ahead.
    struct Asking {
        int number, end, page = 0;
        Staged to;
    };
    __device__ __forceinline__ void load_page(const Span& span, Asking& asking) const {
        if (asking.number >= asking.end) return;
        const Item item(asking.number / 2, span.end - span.begin);
        asking.page = c.pages[span.tile.sequence * c.page_row + span.begin + item.page];
    }
    __device__ __forceinline__ Asking asking_of(const Span& span, const Staged& from) const {
        const int warp = thread / 32;
        Asking asking{.number = warp, .end = 4 * (span.end - span.begin), .to = from};
        asking.to.go_on(warp, places);
        load_page(span, asking);
        return asking;
    }
    __device__ __forceinline__ void ask(const Span& span, Asking& asking) const {
        const Item item(asking.number / 2, span.end - span.begin);
        if (elected())
            copy(item.values, asking.page * c.kv_heads + span.tile.kv_head, asking.number % 2, asking.to);
        __syncwarp();
        asking.number += kExpanders;
        asking.to.go_on(kExpanders, places);
        load_page(span, asking);
    }

    /// All pages of a span, to the ring. `from`, `to`: the places of the next unit and page.
    __device__ __forceinline__ void expand_span(Staged& from, Ring::Place& to, const Span& span) const {
        Asking asking = asking_of(span, from);
        while (asking.number < min(places, asking.end)) ask(span, asking);
#pragma unroll 1
        for (int n = 0; n < asking.end; ++n) {
            const int half = n % 2;
            const Side s(c, Item(n / 2, span.end - span.begin).values);
            Pieces p;
            wait_phase(barriers->full + from.place, from.phase);
            load(s, unit(from.place), p);
            __syncwarp();
            if (thread % 32 == 0) arrive(barriers->empty + from.place);
            from.go_on(1, places);
            if (half == 0) wait_phase(ring.barriers->empty + to.slot, to.phase ^ 1);
            expand(s.packing, p, shared_address(ring.slot(to)) + half * (kUnitRows * 128));
            if (half == 1) {
                fence_async_proxy();
                __syncwarp();
                if (thread % 32 == 0) arrive(ring.barriers->full + to.slot);
                to.go_on();
            }
            if (asking.number == n + places && asking.number < asking.end) ask(span, asking);
        }
    }
};

}  // namespace quern::cuda::attention::prefill

#endif
