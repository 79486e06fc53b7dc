// Attention of prompt rows by products of warpgroups over packed caches: four warps beside those that multiply.
//
//   warp 8        copies blocks of pages, as they are packed, to two places in shared memory, in the order of the ring
//   warps 9..11   expand them to BF16 in the ring's slots, in the swizzled form that the copy engine would leave
//
// The ring has four slots then (prefill_ring.cuh); what is staged takes the fifth one's memory.
#pragma once

#include "ggml-like/cuda/attention/packed.cuh"
#include "ggml-like/cuda/attention/prefill_ring.cuh"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"

#if QUERN_WGMMA

namespace quern::cuda::attention::prefill {

using namespace ptx;
using kv::Packing;

constexpr int kStaged = 2, kExpanders = 3;
static_assert(kPackedWarpgroupShared ==
              1024 + kQueryBytes + kPackedSlots * kSlotBytes + kStaged * kStagedBlock);

/// Static shared memory.
struct StagedBarriers {
    uint64_t full[kStaged], empty[kStaged];
};

struct Staged {
    using Ring = prefill::Ring<kPackedSlots>;

    const AttentionCall& c;
    const Ring& ring;
    StagedBarriers* barriers;

    __device__ __forceinline__ void init() const {
        if (threadIdx.x >= kStaged) return;
        init_phases(barriers->full + threadIdx.x, 1);
        init_phases(barriers->empty + threadIdx.x, kExpanders);
    }
    __device__ __forceinline__ char* block(int place) const {
        return ring.queries + kQueryBytes + kPackedSlots * kSlotBytes + place * kStagedBlock;
    }

    /// One lane: the blocks of a span. `at`: of the next block.
    __device__ __forceinline__ void copy_span(Place<kStaged>& at, const Span& span) const {
        const int k_bytes = packed::Block(c.k_layout).bytes, v_bytes = packed::Block(c.v_layout).bytes;
        walk(c, span, [&](bool values, int head) {
            const int bytes = values ? v_bytes : k_bytes;
            const char* from = reinterpret_cast<const char*>(values ? c.v_cache : c.k_cache) +
                               static_cast<int64_t>(head) * bytes;
            uint64_t* full = barriers->full + at.slot;
            wait_phase(barriers->empty + at.slot, at.phase ^ 1);
            arrive_and_expect(full, bytes);
            copy_bytes(block(at.slot), from, bytes, full);
            at.go_on();
        });
    }

    /// Eight elements of row r: piece p of 16 bytes, as copy_box would leave it.
    __device__ __forceinline__ static void put(char* slot, int r, int p, const uint4& x) {
        *reinterpret_cast<uint4*>(slot + p / 8 * kColumnBytes + r * 128 + (((p ^ r) & 7) << 4)) = x;
    }
    __device__ __forceinline__ void expand_fp8(const packed::Block& b, const char* from, char* to,
                                               int thread) const {
        for (int i = thread; i < kKeysPerPage * kDim / 16; i += 32 * kExpanders) {
            const uint4 x = *reinterpret_cast<const uint4*>(from + i * 16);
            const int r = i / 16, p = i % 16 * 2,
                      odd = i >> 2 & 1;  // odd: the second piece first, for other banks
            const uint32_t scale = *reinterpret_cast<const uint16_t*>(from + b.scales_at + r * 2);
            const uint32_t by = packed::factor_of(Packing::fp8, scale, 0).by;
            const uint4 low = packed::expand_fp8(x.x, x.y, by), high = packed::expand_fp8(x.z, x.w, by);
            put(to, r, p + odd, odd ? high : low);
            put(to, r, p + 1 - odd, odd ? low : high);
        }
    }
    template <Packing kPacking>
    __device__ __forceinline__ void expand_codes(const packed::Block& b, const char* from, char* to,
                                                 int thread) const {
        const packed::Table table = packed::table_of(kPacking);
        for (int i = thread; i < kKeysPerPage * kDim / 32; i += 32 * kExpanders) {
            const uint4 x = *reinterpret_cast<const uint4*>(from + i * 16);
            const int r = i / 8, first = i % 8;
            const char* scales = from + b.scales_at + r * b.scales;
            uint32_t scale = *reinterpret_cast<const uint16_t*>(scales), of16 = 0;
            if constexpr (kPacking == Packing::steps)
                scale |= uint32_t{*reinterpret_cast<const uint16_t*>(scales + 2)} << 16;
            if constexpr (kPacking == Packing::nvfp4)
                of16 = *reinterpret_cast<const uint16_t*>(from + b.blocks_at + r * b.blocks + first * 2);
            const packed::Factor low = packed::factor_of(kPacking, scale, static_cast<uint8_t>(of16)),
                                 high = packed::factor_of(kPacking, scale, static_cast<uint8_t>(of16 >> 8));
            const uint32_t codes[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                put(to, r, 4 * first + j, packed::expand_codes(table, codes[j], j < 2 ? low : high));
        }
    }
    __device__ __forceinline__ void expand(Packing packing, const packed::Block& b, const char* from,
                                           char* to, int thread) const {
        if (packing == Packing::fp8) return expand_fp8(b, from, to, thread);
        if (packing == Packing::nvfp4) return expand_codes<Packing::nvfp4>(b, from, to, thread);
        if (packing == Packing::centroids) return expand_codes<Packing::centroids>(b, from, to, thread);
        expand_codes<Packing::steps>(b, from, to, thread);
    }

    /// Warps 9 to 11, of which `thread` is one: all blocks of a span, to the ring.
    __device__ __forceinline__ void expand_span(Place<kStaged>& from, Ring::Place& to, const Span& span,
                                                int thread) const {
        const packed::Block k(c.k_layout), v(c.v_layout);
        for (int begin = span.begin; begin < span.end; begin += kSegmentPages) {
            const int items = 2 * (min(begin + kSegmentPages, span.end) - begin);
#pragma unroll 1
            for (int i = 0; i < items; ++i) {
                // K0 K1 V0 K2 V1 ... Kn Vn-1 Vn
                const bool values = i > 1 && (i % 2 == 0 || i + 1 == items) || (items == 2 && i == 1);
                wait_phase(barriers->full + from.slot, from.phase);
                wait_phase(ring.barriers->empty + to.slot, to.phase ^ 1);
                expand(values ? c.v_packing : c.k_packing, values ? v : k, block(from.slot), ring.slot(to),
                       thread);
                fence_shared_for_wgmma();
                __syncwarp();
                if (thread % 32 == 0) {
                    arrive(ring.barriers->full + to.slot);
                    arrive(barriers->empty + from.slot);
                }
                from.go_on(), to.go_on();
            }
        }
    }
};

}  // namespace quern::cuda::attention::prefill

#endif
