// The work of a few-row step as groups: up to kPassRows rows of one expert. Read from ids and groups by every
// block for itself; the shared expert's groups come first.
#pragma once

#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/piece_ring.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

inline constexpr int kGroupPairs = 512;  // of a step
inline constexpr int kGroupRows = kMaxFp4Rows;
inline constexpr int kGroupThreads = 512;

struct ExpertGroup {
    short expert;  // -1: the shared expert
    short count;   // rows, 1..kPassRows
    int first;     // in `pair`; of the shared expert: the first row
};

struct ExpertGroups {
    ExpertGroup group[kGroupPairs + kGroupRows / kPassRows];
    short pair[kGroupPairs];  // t * used + j
    int count, shared;        // groups; of the shared expert
    int sums[kGroupThreads / 32];
};

/// All kGroupThreads threads; a barrier at the end. group_at(i): number i of groups (ops/moe_gate_up.h);
/// `shared_rows`: rows of the shared expert.
template <typename GroupAt>
__device__ __forceinline__ void list_groups(ExpertGroups& list, const GroupAt& group_at, int experts,
                                            int pairs, int shared_rows) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (tid < pairs) list.pair[tid] = static_cast<short>(group_at(experts + 1 + tid));
    const int shared_groups = (shared_rows + kPassRows - 1) / kPassRows;
    int before = shared_groups;
    if (tid < before)
        list.group[tid] = {-1, static_cast<short>(min(kPassRows, shared_rows - tid * kPassRows)),
                           tid * kPassRows};
#pragma unroll 1
    for (int base = 0; base < experts && pairs > 0; base += kGroupThreads) {
        const int e = base + tid;
        const int begin = e < experts ? group_at(e) : 0, end = e < experts ? group_at(e + 1) : 0;
        const int own = (end - begin + kPassRows - 1) / kPassRows;
        int sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) list.sums[warp] = sum;
        __syncthreads();
        int warps_before = lane < warp ? list.sums[lane] : 0;
        const int all = lane < kGroupThreads / 32 ? list.sums[lane] : 0;
        warps_before = static_cast<int>(__reduce_add_sync(0xffffffffu, warps_before));
        const int place = before + warps_before + sum - own;
        before += static_cast<int>(__reduce_add_sync(0xffffffffu, all));
#pragma unroll 1
        for (int i = 0; i < own; ++i)
            list.group[place + i] = {static_cast<short>(e),
                                     static_cast<short>(min(kPassRows, end - begin - i * kPassRows)),
                                     begin + i * kPassRows};
        __syncthreads();
    }
    if (tid == 0) list.count = before, list.shared = shared_groups;
    __syncthreads();
}

/// The same of groups in memory.
__device__ __forceinline__ void list_groups(ExpertGroups& list, const int* groups, int experts, int pairs,
                                            int shared_rows) {
    list_groups(
        list, [&](int i) { return __ldcg(groups + i); }, experts, pairs, shared_rows);
}

/// total += splits [first, last) of a tile, whose chunks lie at `chunk`. x: the lane's row, plus 16 t.
template <bool kHalf>
__device__ __forceinline__ void add_splits_of(const ColumnSplits& splits, int first, int last,
                                              const uint8_t* chunk, const uint8_t* x, int lane,
                                              float (&total)[4]) {
    x += splits.begin(first) * 128;
    for (int q = first; q < last; ++q) {
        float sum[4] = {};
        for (int c = splits.begin(q); c < splits.end(q); ++c, chunk += kFp4Chunk, x += 128)
            multiply_fp4<kHalf>(chunk, x, lane, sum);
#pragma unroll
        for (int i = 0; i < 4; i += kHalf ? 2 : 1) total[i] += sum[i];
    }
}

/// Sums over a tile whose pieces come through a ring: `piece_splits` splits a piece. `request` asks for the
/// next piece.
template <bool kHalf, typename Request>
__device__ __forceinline__ void sum_tile(PieceRing& ring, const ColumnSplits& splits, int piece_splits,
                                         const uint8_t* x, int lane, Request&& request, float (&total)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = 0;
    for (int p = 0; p < splits.count; p += piece_splits) {
        add_splits_of<kHalf>(splits, p, min(p + piece_splits, splits.count), ring.wait(), x, lane, total);
        ring.release();
        request();
    }
}

}  // namespace quern::cuda::moe
