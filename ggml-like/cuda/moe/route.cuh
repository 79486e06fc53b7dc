// What kernels that choose experts from logits share (choose_experts.cu, gate_up_fp4_one.cu, few_choice.cuh, block_choice.cuh): weights,
// groups of few pairs, the choice of one row by several warps.
//
// Whoever chooses takes the same experts in the same order: the largest logits, falling, ties to the lower id.
#pragma once

#include <climits>

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx/ordered_bits.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::moe {

using namespace ptx;

inline constexpr int kMaxExperts = 512;

/// Lane j's weight from its choice's key: softmax over the `used` chosen. factor: of the norm, for all logits.
__device__ __forceinline__ float weight_of(uint32_t mine, int used, float factor) {
    const float logit = from_ordered_bits(mine) * factor;
    const float highest = __shfl_sync(0xffffffffu, logit, 0);
    const float e = static_cast<int>(threadIdx.x % 32) < used ? __expf(logit - highest) : 0.0f;
    return e / warp_sum(e);
}
__device__ __forceinline__ float gate_of(float logit) { return 1.0f / (1.0f + __expf(-logit)); }

inline constexpr int kNoExpert = INT_MAX;

/// Groups (ops/moe_gate_up.h) from ids, by all threads of one block: a thread an expert and a thread a pair, which
/// count. Behind the ids comes kNoExpert, up to a multiple of four.
__device__ __forceinline__ void group_few(const int* ids, int pairs, int experts, int* groups) {
    const int tid = threadIdx.x;
    const int own = tid < pairs ? ids[tid] : -1;
    int before = 0, place = 0;
    const auto count = [&](int id, int j) {
        before += id < tid;
        place += id < own + (j < tid);
    };
#pragma unroll 1
    for (int j = 0; j < pairs; j += 4) {
        const int4 four = *reinterpret_cast<const int4*>(ids + j);
        count(four.x, j), count(four.y, j + 1), count(four.z, j + 2), count(four.w, j + 3);
    }
    if (tid <= experts) groups[tid] = before;
    if (tid == 0) groups[experts] = pairs;
    if (tid < pairs) groups[experts + 1 + place] = tid;
}

// One row, by several warps.

inline constexpr int kRankers = 8;  // warps, an expert a thread

/// Shared memory of choose_by_rank.
struct RankedChoice {
    static constexpr int kTogether = 4;  // candidates that are read at once
    uint32_t best[kRankers];             // of each warp
    int count;
    /// key << 32 | ~expert, which order as choices do; behind the last one zeros.
    __align__(16) uint64_t candidate[kRankers * 32 + kTogether];
    int ids[kMaxUsed];
    uint32_t bits[kMaxUsed];  // keys of ids
};

/// The first lane of a warp: adds to a number in shared memory. `lane` is its own, 0, of which the assembler does not know: it would make
/// one addition of many lanes' where it knows that they have one address.
__device__ __forceinline__ int add_shared(int* to, int lane, int by) {
    asm volatile("mov.b32 %0, %0;" : "+r"(lane));
    int before;
    asm volatile("atom.shared.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(to + lane)), "r"(by)
                 : "memory");
    return before;
}

/// By kRankers warps; thread i of them has expert i's logit, if there is one. The best in order, into choice.ids and
/// bits, without a barrier at the end. used <= kRankers: at least kRankers experts reach the smallest of the warps'
/// maxima, so only those that do are ranked. Before, choice.count and choice.candidate are zeros (clear_ranked).
__device__ __forceinline__ void choose_by_rank(float logit, int experts, int used, int i,
                                               RankedChoice& choice) {
    const auto barrier = [] { asm volatile("bar.sync 2, %0;" ::"n"(kRankers * 32) : "memory"); };
    const uint32_t key = i < experts ? ordered_bits(logit) : 0;
    const uint64_t own = uint64_t{key} << 32 | ~static_cast<uint32_t>(i);
    const uint32_t best = __reduce_max_sync(0xffffffffu, key);
    if (i % 32 == 0) choice.best[i / 32] = best;
    barrier();
    uint32_t least = choice.best[0];
#pragma unroll
    for (int w = 1; w < kRankers; ++w) least = min(least, choice.best[w]);
    const bool wanted = i < experts && key >= least;
    const unsigned all = __ballot_sync(0xffffffffu, wanted);
    int place = 0;
    if (i % 32 == 0) place = add_shared(&choice.count, i % 32, __popc(all));
    place = __shfl_sync(0xffffffffu, place, 0) + __popc(all & ((1u << i % 32) - 1));
    if (wanted) choice.candidate[place] = own;
    barrier();
    int rank = 0;
    const int count = choice.count;
#pragma unroll 1
    for (int j = 0; j < count; j += RankedChoice::kTogether) {
        const auto* other = reinterpret_cast<const ulonglong2*>(choice.candidate + j);
        const ulonglong2 a = other[0], b = other[1];
        rank += (a.x > own) + (a.y > own) + (b.x > own) + (b.y > own);
    }
    if (wanted && rank < used) choice.ids[rank] = i, choice.bits[rank] = key;
}
/// By the same threads, some barrier before.
__device__ __forceinline__ void clear_ranked(int i, RankedChoice& choice) {
    choice.candidate[i] = 0;
    if (i < RankedChoice::kTogether) choice.candidate[kRankers * 32 + i] = 0;
    if (i == 0) choice.count = 0;
}
static_assert(kRankers <= 8, "read at once");

// What one row chose, for a kernel that does not wait for the end of the one that chooses.

/// An expert and its weight, written and read as 8 bytes at once; zeros: not chosen yet.
struct Chosen {
    int id;
    float weight;
};

__device__ __forceinline__ void publish(uint64_t* to, const Chosen& c) {
    const uint64_t bits = static_cast<uint64_t>(c.id + 1) << 32 | __float_as_uint(c.weight);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
/// Polls until it has been published.
__device__ __forceinline__ Chosen published(const uint64_t* from) {
    uint64_t bits;
    do {
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
    } while (bits == 0);
    return {static_cast<int>(bits >> 32) - 1, __uint_as_float(static_cast<uint32_t>(bits))};
}

}  // namespace quern::cuda::moe
