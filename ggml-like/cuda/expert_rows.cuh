// Which experts a step of few rows needs, and who needs them: read from ids and groups by every block for itself.
#pragma once

#include "ggml-like/cuda/few_rows.cuh"

namespace quern::cuda {

inline constexpr int kMostPairs = 256;  // of a few-row step

struct ExpertList {
    int expert[kMostPairs];
    int first[kMostPairs + 1];  // in `pair`; expert i has pairs first[i] .. first[i + 1]
    int pair[kMostPairs];       // t * used + j
    int count;
    unsigned ballots[kMostPairs / 32];
};

/// All threads of the block; a barrier at the end. groups as in ops/moe_route.h.
__device__ __forceinline__ void list_experts(ExpertList& list, const int* ids, const int* groups, int experts,
                                             int pairs) {
    const int i = threadIdx.x, warp = i / 32;
    int id = -1, pair = 0;
    bool first = false;
    if (i < pairs) {
        pair = __ldcg(groups + experts + 1 + i);
        id = __ldcg(ids + pair);
        first = i == 0 || id != __ldcg(ids + __ldcg(groups + experts + i));
    }
    if (warp < kMostPairs / 32) {
        const unsigned ballot = __ballot_sync(0xffffffffu, first);
        if (i % 32 == 0) list.ballots[warp] = ballot;
    }
    __syncthreads();
    if (i < kMostPairs) {
        int before = __popc(list.ballots[warp] & ((1u << (i % 32)) - 1));
        int total = 0;
        for (int w = 0; w < kMostPairs / 32; ++w) {
            if (w < warp) before += __popc(list.ballots[w]);
            total += __popc(list.ballots[w]);
        }
        if (i < pairs) list.pair[i] = pair;
        if (first) {
            list.expert[before] = id;
            list.first[before] = i;
        }
        if (i == 0) {
            list.count = total;
            list.first[total] = pairs;
        }
    }
    __syncthreads();
}

}  // namespace quern::cuda
