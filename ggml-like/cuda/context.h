// What a CUDA op gets to work with: nothing that it may look at changes while a graph runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ggml-like/cuda/card.h"

namespace quern {
struct Node;
struct Tensor;
}  // namespace quern

namespace quern::cuda {
namespace comm {
struct Peers;
}

inline constexpr int kCounters = 4096;
inline constexpr int kTourCounters = 2;  // behind them, of moe/expert_tour.cuh
inline constexpr int kMaxUsed = 32;      // experts of a row

/// The kernels that a node launched, in order; those beyond kMax are not told.
struct Launched {
    static constexpr int kMax = 16;
    const char* kernel[kMax];
    int count = 0;
};

struct Context : Card {
    cudaStream_t stream = nullptr;
    /// [kCounters + kTourCounters] zeros; a kernel that counts leaves zeros behind. Kernels that may be under way together take
    /// different ones.
    unsigned* counters = nullptr;
    const comm::Peers* peers = nullptr;  // of a rank of several: how it reaches the others
    Launched* launched = nullptr;        // where launches are told, if somebody wants to know
    int64_t window_bytes = 0;            // that a launch may name as read once (ReadOnce), at most
};

}  // namespace quern::cuda
