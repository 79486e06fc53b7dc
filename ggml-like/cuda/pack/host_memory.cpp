#include "ggml-like/cuda/pack/host_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

#include "ggml-like/check.h"
#include "ggml-like/planner.h"

namespace quern::cuda::pack {

void* alloc_host(int64_t bytes, const char* what) {
    const int64_t size = (std::max<int64_t>(bytes, 1) + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment;
    void* memory = nullptr;
    if (cudaMallocHost(&memory, static_cast<size_t>(size)) == cudaSuccess) return memory;
    cudaGetLastError();
    memory = std::aligned_alloc(kPlanAlignment, static_cast<size_t>(size));
    if (memory == nullptr) FAIL(memory, "not enough memory: {} bytes for {}", bytes, what);
    return memory;
}

void free_host(void* memory) {
    if (memory == nullptr) return;
    cudaPointerAttributes attributes{};
    const bool pinned =
        cudaPointerGetAttributes(&attributes, memory) == cudaSuccess && attributes.type == cudaMemoryTypeHost;
    if (pinned)
        cudaFreeHost(memory);
    else
        std::free(memory);
}

}  // namespace quern::cuda::pack
