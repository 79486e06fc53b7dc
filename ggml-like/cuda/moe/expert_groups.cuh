// The work of a step of up to 64 rows as groups: up to kPassRows (8) rows of one expert, which meet its weights
// together. Every block makes the list for itself, from groups (ops/moe_gate_up.h) or from its own choice
// (block_choice.cuh).
//
//     list   | shared: rows 0..7 | shared: rows 8..15 | ... | expert 3: 8 pairs | expert 3: 2 pairs | expert 7 ...
#pragma once

#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/piece_ring.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

inline constexpr int kGroupRows = kMaxFp4Rows;
inline constexpr int kGroupThreads = 512;

struct ExpertGroup {
    short expert;  // -1: the shared expert
    short count;   // rows, 1..kPassRows
    int first;     // place of its first pair in `pair`; of the shared expert its first row
};

struct ExpertGroups {
    ExpertGroup group[kGroupPairs + kGroupRows / kPassRows];
    short pair[kGroupPairs];  // t * used + j
    int count, shared;        // groups, and those of the shared expert
    int sums[kGroupThreads / 32];
};

/// All threads: the shared expert's groups. Returns how many there are.
__device__ __forceinline__ int list_shared_groups(ExpertGroups& list, int rows) {
    const int tid = threadIdx.x, groups = (rows + kPassRows - 1) / kPassRows;
    if (tid < groups)
        list.group[tid] = {-1, static_cast<short>(min(kPassRows, rows - tid * kPassRows)), tid * kPassRows};
    return groups;
}

/// All kGroupThreads threads; a barrier at the end. shared_rows: rows that go through the shared expert.
__device__ __forceinline__ void list_groups(ExpertGroups& list, const int* groups, int experts, int pairs,
                                            int shared_rows) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (tid < pairs) list.pair[tid] = static_cast<short>(__ldcg(groups + experts + 1 + tid));
    const int shared_groups = list_shared_groups(list, shared_rows);
    int before = shared_groups;
#pragma unroll 1
    for (int base = 0; base < experts && pairs > 0; base += kGroupThreads) {
        const int e = base + tid;
        const int begin = e < experts ? __ldcg(groups + e) : 0,
                  end = e < experts ? __ldcg(groups + e + 1) : 0;
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

}  // namespace quern::cuda::moe
