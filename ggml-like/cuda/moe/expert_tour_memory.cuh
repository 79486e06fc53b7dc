// What the two kinds of warps of expert_tour.cuh share: the ring of stages, the slots of tiles, the lists of experts.
#pragma once

#include "ggml-like/cuda/linear/gemm_task.cuh"
#include "ggml-like/cuda/moe/expert_shapes.h"
#include "ggml-like/cuda/ptx/tensor_map.cuh"
#include "ggml-like/cuda/ptx/wgmma.cuh"

#if QUERN_WGMMA

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// A tile on its way from the copying warps to the multiplying ones.
struct TourSlot {
    int expert, row_block, count;       // expert -1: the shared one
    int first;                          // the first row of x; also of y, except in moe_down
    int y[Tour<Kind::nvfp4>::kTokens];  // moe_down only: rows of y
    float scale[Tour<Kind::nvfp4>::kTokens];
};

/// Of all experts: where their pairs begin, and their tiles of tokens. The last: the ends.
struct TourLists {
    int pairs[Tour<Kind::nvfp4>::kMaxExperts + 1];
    int tiles[Tour<Kind::nvfp4>::kMaxExperts + 1];
    int sums[16];
};
static_assert(sizeof(TourSlot) == Tour<Kind::nvfp4>::kSlotBytes);
static_assert(sizeof(TourLists) <= Tour<Kind::nvfp4>::kListBytes);

template <Kind K>
struct TourMemory {
    using S = Tour<K>;
    const GemmTask& task;
    const CUtensorMap &w, &shared_w, &x, &shared_x;
    uint8_t* shared;
    uint64_t *full, *empty;  // of stages
    uint64_t* ready;         // of slots

    __device__ __forceinline__ uint8_t* tokens_of(int stage) const { return shared + stage * S::kTokenBytes; }
    __device__ __forceinline__ uint8_t* weights_of(int stage) const {
        return shared + S::kStages * S::kTokenBytes + stage * S::kWeightBytes;
    }
    __device__ __forceinline__ TourSlot& slot(int n) const {
        return reinterpret_cast<TourSlot*>(shared + S::kStages * (S::kTokenBytes + S::kWeightBytes))[n];
    }
    __device__ __forceinline__ TourLists& lists() const {
        return *reinterpret_cast<TourLists*>(&slot(S::kSlots));
    }

    __device__ __forceinline__ void init_barriers() const {
        if (threadIdx.x < S::kStages) {
            init_phases(full + threadIdx.x, 2);
            init_phases(empty + threadIdx.x, S::kSumThreads / 32);
        }
        if (threadIdx.x < S::kSlots) init_phases(ready + threadIdx.x, 1);
        publish_phases();
    }

    /// Stages of a tile.
    __device__ __forceinline__ int steps() const {
        return max(S::kLeastSteps, (task.chunks + S::kChunks - 1) / S::kChunks);
    }

    /// Of the list of `size` that goes round.
    struct Turn {
        int at = 0;
        uint32_t phase = 0;
        __device__ __forceinline__ void next(int size) {
            if (++at == size) at = 0, phase ^= 1;
        }
    };

    /// The next tile, once it is known; null: there is no more.
    __device__ __forceinline__ const TourSlot* next_slot(Turn& turn) const {
        wait_phase(ready + turn.at, turn.phase);
        const TourSlot* s = &slot(turn.at);
        turn.next(S::kSlots);
        return s->count > 0 ? s : nullptr;
    }
};

}  // namespace quern::cuda::moe

#endif
