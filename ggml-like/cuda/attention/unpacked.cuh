// Pages that a prompt step unpacks before its attention (unpack.cu): those of all its sequences, one after another, keys and then
// values [pages][G][64][256] in BF16, behind the sums that call.work has first. If they do not all fit, none are unpacked, and the
// rows meet the pages as they are packed; both give the same bits.
#pragma once

#include "ggml-like/cuda/attention/attention.h"

namespace quern::cuda::attention {

inline constexpr int64_t kUnpackedAt = kHeldSlots * kHeldBytes;
static_assert(kUnpackedAt % 1024 == 0);

/// Pages of a sequence's keys, after the step.
__device__ __forceinline__ int pages_of(const AttentionCall& c, int sequence) {
    const int end = c.start[sequence + 1];
    return end == c.start[sequence] ? 0 : c.positions[end - 1] / kKeysPerPage + 1;
}
/// Pages of the sequences before one; with c.sequences, of all.
__device__ __forceinline__ int pages_before(const AttentionCall& c, int sequence) {
    int pages = 0;
    for (int s = 0; s < sequence; ++s) pages += pages_of(c, s);
    return pages;
}
__device__ __forceinline__ bool fits_unpacked(const AttentionCall& c) {
    return pages_before(c, c.sequences) <= c.unpacked_room;
}

/// Where a sequence's pages are in the caches of a call.
struct PageTable {
    const int* pages;
    int first = 0;

    __device__ __forceinline__ PageTable(const AttentionCall& c, int sequence)
        : pages(c.unpacked ? nullptr : c.pages + sequence * c.page_row) {
        if (c.unpacked) first = pages_before(c, sequence);
    }
    __device__ __forceinline__ int at(int page) const {
        return pages == nullptr ? first + page : pages[page];
    }
};

/// The same call over unpacked pages.
inline AttentionCall over_unpacked(const AttentionCall& call) {
    AttentionCall c = call;
    c.unpacked = true;
    c.k_packing = c.v_packing = kv::Packing::plain;
    c.cache_pages = c.unpacked_room;
    c.k_cache = reinterpret_cast<bf16*>(static_cast<char*>(c.work) + kUnpackedAt);
    c.v_cache = c.k_cache + c.cache_pages * c.kv_heads * kKeysPerPage * c.head_dim;
    return c;
}

}  // namespace quern::cuda::attention
