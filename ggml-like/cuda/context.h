// What a CUDA op gets to work with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace quern {
struct Node;
struct Tensor;
}  // namespace quern

namespace quern::cuda {

inline constexpr int kCounters = 4096;
inline constexpr int kMostUsed = 32;  // experts of a row

inline constexpr int kLeftRows = 8, kLeftLogits = 264, kLeftTiles = 512;

/// Sums over a row of x, made by the kernel that makes x for those that read it.
struct RowSums {
    int64_t logits[kLeftRows][kLeftLogits];  // of the router (route_work.cuh); zeros between steps
    float squares[kLeftRows][kLeftTiles];    // of 16 columns (left_norm.cuh)
};

/// The norm of x whose factor is left to be multiplied later: h is x * norm only (left_norm.cuh).
struct LeftNorm {
    const Node* node = nullptr;  // whose norm it is; null: nothing is left
    const RowSums* sums = nullptr;
    int tiles = 0;  // of 16 columns
    float per_column = 0, eps = 0;
};

/// The choice of experts that linear_add leaves to moe_gate_up, past a moe_route that has nothing to do then:
/// few rows. Every block of gate and up chooses for itself, which is sooner than one block's choice that all
/// others wait for. Logits in `norm`'s sums lack its factor, too.
struct LeftChoice {
    LeftNorm norm;  // of the moe_route
    int experts = 0;
    int* ids = nullptr;  // where results go, as ops/moe_route.h has them
    float *weights = nullptr, *shared = nullptr;
    int* groups = nullptr;
    uint64_t* chosen = nullptr;  // [K + 1] route.cuh's Chosen, the shared expert's gate last; zeros before.
                                 // Of more rows than one the first says that results are complete
};

struct Context {
    cudaStream_t stream = nullptr;
    int sms = 0;
    int capability = 0;            // 90, 120 ...
    int shared_bytes = 0;          // most dynamic shared memory of one block
    unsigned* counters = nullptr;  // [kCounters] zeros; a kernel that counts leaves zeros behind
    const int* settled_groups =
        nullptr;                  // moe_gate_up: complete, as ids and weights are, when its successor starts
    const Node* after = nullptr;  // the nodes that run after the one that is being launched
    int after_count = 0;
    uint64_t* chosen = nullptr;       // [kMostUsed + 1], for LeftChoice
    RowSums* sums = nullptr;          // for LeftNorm
    LeftChoice left;                  // by a node before
    LeftNorm left_norm;               // the same, for a norm_linear
    const int* chosen_ids = nullptr;  // moe_gate_up chose these, and publishes them in `chosen` while it runs
};

}  // namespace quern::cuda
