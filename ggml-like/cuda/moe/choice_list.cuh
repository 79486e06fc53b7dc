// What moe_down is told of the choices of a step of 2 to 8 rows (Choice::ready), as soon as they are made: a list of groups, each
// the rows of one expert, and these rows side by side.
//
//     groups   | shared | expert 3 | expert 7 | expert 9 | none ...         a word each, rows * (used + 1) of them
//     places   | shared: rows 0, 1 .. | rows of expert 3 | of expert 7 ..   a word each, as many
//
// A word is 8 bytes that are written and read at once, and not 0: who finds 0 asks again.
#pragma once

#include "ggml-like/cuda/moe/mixture_shapes.h"
#include "ggml-like/cuda/moe/moe.h"

namespace quern::cuda::moe {

using namespace ptx;

inline constexpr int kFewPairs = kFewStepRows * kMaxChoiceUsed;
inline constexpr int kFewPlaces = kFewPairs + kFewStepRows;

inline constexpr uint64_t kTold = 1ull << 63;

/// A group: its expert, -1 the shared one; its rows; the place of the first. count 0: there is no such group.
struct ListedGroup {
    int expert, count, place;

    __device__ __forceinline__ uint64_t word() const {
        return kTold | static_cast<uint64_t>(expert + 1) << 32 | count << 16 | place;
    }
    __device__ __forceinline__ static ListedGroup of(uint64_t w) {
        return {static_cast<int>(w >> 32 & 0xffff) - 1, static_cast<int>(w >> 16 & 0xffff),
                static_cast<int>(w & 0xffff)};
    }
};
/// A row at its place: its term, row * (used + 1) + the number among what the row chose, the shared expert's last; expert, as
/// above; weight.
struct ListedRow {
    int term, expert;
    float weight;

    __device__ __forceinline__ uint64_t word() const {
        return kTold | static_cast<uint64_t>(expert + 1) << 48 | static_cast<uint64_t>(term) << 32 |
               __float_as_uint(weight);
    }
    __device__ __forceinline__ static ListedRow of(uint64_t w) {
        return {static_cast<int>(w >> 32 & 0xffff), static_cast<int>(w >> 48 & 0x7fff) - 1,
                __uint_as_float(static_cast<uint32_t>(w))};
    }
};

__device__ __forceinline__ void tell(uint64_t* to, uint64_t word) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
/// Polls until it has been told.
__device__ __forceinline__ uint64_t told(const uint64_t* from) {
    uint64_t word;
    do {
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    } while (word == 0);
    return word;
}

/// Shared memory of tell_choices.
struct ChoiceList {
    int ids[kFewPairs];
    bool leads[kFewPairs];  // the first row that has the pair's expert
};

/// The whole block, whose threads see ids, weights, shared_gate of all rows: c.ready. At least as many threads as places.
__device__ __forceinline__ void tell_choices(const Choice& c, ChoiceList& list) {
    const int tid = threadIdx.x, pairs = c.rows * c.used, terms = c.used + 1, places = c.rows * terms;
    if (tid < pairs) list.ids[tid] = __ldcg(c.ids + tid);
    __syncthreads();
    const int own = tid < pairs ? list.ids[tid] : -1;
    int smaller = 0, same = 0,
        before = 0;  // pairs with a smaller id, with the same one, those of them before this one
#pragma unroll 4
    for (int j = 0; j < pairs; ++j) {
        const int id = list.ids[j];
        smaller += id < own;
        same += id == own;
        before += id == own && j < tid;
    }
    const bool leads = tid < pairs && before == 0;
    if (tid < pairs) list.leads[tid] = leads;
    const int groups = 1 + __syncthreads_count(leads), row = quotient(tid, c.used);
    if (tid < pairs) {
        const ListedRow listed{tid + row, own, __ldcg(c.weights + tid)};
        tell(c.ready + places + c.rows + smaller + before, listed.word());
    }
    if (leads) {
        int group = 1;
#pragma unroll 4
        for (int j = 0; j < pairs; ++j) group += list.leads[j] && list.ids[j] < own;
        tell(c.ready + group, ListedGroup{own, same, c.rows + smaller}.word());
    }
    if (tid < c.rows) {
        const ListedRow listed{tid * terms + c.used, -1, __ldcg(c.shared_gate + tid)};
        tell(c.ready + places + tid, listed.word());
    }
    if (tid == 0) tell(c.ready, ListedGroup{-1, c.rows, 0}.word());
    if (tid >= groups && tid < places) tell(c.ready + tid, ListedGroup{0, 0, 0}.word());
}

}  // namespace quern::cuda::moe
