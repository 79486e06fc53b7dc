// Which experts a step of few rows needs, and who needs them: read from ids and groups by every block for
// itself.
#pragma once

#include "ggml-like/cuda/few_rows.cuh"

namespace quern::cuda {

inline constexpr int kMostPairs = 256;  // of a few-row step

struct ExpertList {
    int expert[kMostPairs];
    int first[kMostPairs + 1];  // in `pair`; expert i has pairs first[i] .. first[i + 1]
    int pair[kMostPairs];       // t * used + j
    int count;
    int ballots[kThreads / 32];
};

/// All threads of the block, at most 512; a barrier at the end. groups as in ops/moe_route.h: all its loads
/// are under way together.
__device__ __forceinline__ void list_experts(ExpertList& list, const int* groups, int experts, int pairs) {
    const int tid = threadIdx.x, threads = blockDim.x;
    if (tid < pairs) list.pair[tid] = __ldcg(groups + experts + 1 + tid);
    if (tid == 0) list.count = 0;
    int found = 0;
    for (int base = 0; base < experts; base += threads) {
        const int e = base + tid;
        const int begin = e < experts ? __ldcg(groups + e) : 0,
                  end = e < experts ? __ldcg(groups + e + 1) : 0;
        const bool active = end > begin;
        const unsigned ballot = __ballot_sync(0xffffffffu, active);
        __syncthreads();  // ballots of the round before have been read
        if (tid % 32 == 0) list.ballots[tid / 32] = __popc(ballot);
        __syncthreads();
        int place = found + __popc(ballot & ((1u << (tid % 32)) - 1));
        for (int w = 0; w < threads / 32; ++w) {
            if (w < tid / 32) place += list.ballots[w];
            found += list.ballots[w];
        }
        if (active) {
            list.expert[place] = e;
            list.first[place] = begin;
        }
    }
    if (tid == 0) {
        list.count = found;
        list.first[found] = pairs;
    }
    __syncthreads();
}

}  // namespace quern::cuda
