// Which experts some rows of a step need, and which of these rows need each: read from groups by every block for
// itself. ops/moe_gate_up.cu and ops/moe_down.cu use it for weights that are not NVFP4.
#pragma once

#include "ggml-like/cuda/linear/few_rows.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

inline constexpr int kMaxPairs = 256;  // of these rows, at most

struct ExpertList {
    int expert[kMaxPairs];
    int first[kMaxPairs + 1];  // in `pair`; expert i has pairs first[i] .. first[i + 1]
    int pair[kMaxPairs];       // t * used + j, t counted from the first of the rows
    int count;
    int sums[kThreads / 32];
};

/// All threads of the block, at most 512; a barrier at the end. Of the pairs in groups (ops/moe_gate_up.h) it takes
/// those in [pair_begin, pair_begin + pairs).
__device__ __forceinline__ void list_experts(ExpertList& list, const int* groups, int experts, int pair_begin,
                                             int pairs) {
    const int tid = threadIdx.x, threads = blockDim.x, warp = tid / 32, lane = tid % 32;
    const int* all = groups + experts + 1;
    int found = 0;  // (experts << 16) + pairs of the rounds before
    for (int base = 0; base < experts; base += threads) {
        const int e = base + tid;
        int begin = e < experts ? __ldcg(groups + e) : 0;
        const int end = e < experts ? __ldcg(groups + e + 1) : 0;
        while (begin < end && __ldcg(all + begin) < pair_begin) ++begin;  // pairs of an expert rise
        int own = 0;
        while (begin + own < end && __ldcg(all + begin + own) < pair_begin + pairs) ++own;
        const int mine = own > 0 ? 1 << 16 | own : 0;
        int sum = mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) list.sums[warp] = sum;
        __syncthreads();
        int before = found + sum - mine;
        for (int w = 0; w < threads / 32; ++w) {
            if (w < warp) before += list.sums[w];
            found += list.sums[w];
        }
        if (own > 0) {
            list.expert[before >> 16] = e;
            list.first[before >> 16] = before & 0xffff;
            for (int i = 0; i < own; ++i)
                list.pair[(before & 0xffff) + i] = __ldcg(all + begin + i) - pair_begin;
        }
        __syncthreads();
    }
    if (tid == 0) list.count = found >> 16, list.first[found >> 16] = found & 0xffff;
    __syncthreads();
}

}  // namespace quern::cuda::moe
