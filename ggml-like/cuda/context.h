// What a CUDA op gets to work with: nothing of it changes while a graph runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace quern {
struct Node;
struct Tensor;
}  // namespace quern

namespace quern::cuda {

inline constexpr int kCounters = 4096;
inline constexpr int kMaxUsed = 32;  // experts of a row

struct Context {
    cudaStream_t stream = nullptr;
    int sms = 0;
    int capability = 0;            // 90, 120 ...
    int shared_bytes = 0;          // most dynamic shared memory of one block
    unsigned* counters = nullptr;  // [kCounters] zeros; a kernel that counts leaves zeros behind
};

}  // namespace quern::cuda
