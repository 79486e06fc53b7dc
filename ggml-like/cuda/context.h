// What a CUDA op gets to work with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace quern::cuda {

inline constexpr int kCounters = 4096;

struct Context {
    cudaStream_t stream = nullptr;
    int sms = 0;
    int capability = 0;            // 90, 120 ...
    int shared_bytes = 0;          // most dynamic shared memory of one block
    unsigned* counters = nullptr;  // [kCounters] zeros; a kernel that counts leaves zeros behind
    const int* settled_groups =
        nullptr;  // moe_gate_up: complete, as ids and weights are, when its successor starts
};

}  // namespace quern::cuda
