// What a CUDA op gets to work with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace quern {
struct Node;
}

namespace quern::cuda {

inline constexpr int kCounters = 4096;
inline constexpr int kMostUsed = 32;  // experts of a row

/// The choice of experts that moe_route leaves to moe_gate_up: few rows, and that op is next. Every block of
/// gate and up then chooses for itself, which is sooner than one block's choice that all others wait for.
struct LeftChoice {
    const float* logits = nullptr;  // rows `ld` apart; null: nothing is left
    int64_t ld = 0;
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
        nullptr;                 // moe_gate_up: complete, as ids and weights are, when its successor starts
    const Node* next = nullptr;  // what runs after the node that is being launched, if anything
    uint64_t* chosen = nullptr;  // [kMostUsed + 1], for LeftChoice
    LeftChoice left;             // by the node before
    const int* chosen_ids = nullptr;  // moe_gate_up chose these, and publishes them in `chosen` while it runs
};

}  // namespace quern::cuda
