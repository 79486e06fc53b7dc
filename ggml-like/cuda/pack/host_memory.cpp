#include "ggml-like/cuda/pack/host_memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <set>

#include "ggml-like/check.h"
#include "ggml-like/planner.h"

namespace quern::cuda::pack {
namespace {

constexpr int64_t kLarge = 32ll << 20, kHugePage = 2 << 20, kPage = 4096;

std::mutex registered_mutex;
std::set<void*>& registered() {  // pieces that were pinned after they were taken
    static std::set<void*> set;
    return set;
}
std::atomic<int64_t> plain_pieces = 0;

int64_t rounded_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Gives the pages to the process, one by one. MADV_POPULATE_WRITE lets other threads that take or give back memory wait for all of
/// them, up to 1.2 s while 768 MB were made in pieces of 128 MB; for pages that are touched they waited 0.1 ms (Linux 6.18).
void touch(std::byte* memory, int64_t bytes) {
    madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish
    for (int64_t at = 0; at < bytes; at += kPage) const_cast<volatile std::byte*>(memory)[at] = std::byte{};
}

/// The driver lets other threads' calls wait while it pins memory: some 50 ms for 128 MB, nearly all of them for pages that
/// are not there yet. So they are made before, as huge ones, which are few. Null: it cannot be had so.
void* alloc_registered(int64_t bytes) {
    const int64_t size = rounded_up(bytes, kHugePage);
    auto* memory = static_cast<std::byte*>(
        std::aligned_alloc(static_cast<size_t>(kHugePage), static_cast<size_t>(size)));
    if (memory == nullptr) return nullptr;
    touch(memory, size);
    if (cudaHostRegister(memory, static_cast<size_t>(size), cudaHostRegisterPortable) != cudaSuccess) {
        cudaGetLastError();
        std::free(memory);
        return nullptr;
    }
    const std::lock_guard lock(registered_mutex);
    registered().insert(memory);
    return memory;
}

bool forget_registered(void* memory) {
    const std::lock_guard lock(registered_mutex);
    return registered().erase(memory) > 0;
}

}  // namespace

void* alloc_host(int64_t bytes, const char* what) {
    const int64_t size = rounded_up(std::max<int64_t>(bytes, 1), kPlanAlignment);
    void* memory = size >= kLarge ? alloc_registered(size) : nullptr;
    if (memory != nullptr) return memory;
    if (cudaMallocHost(&memory, static_cast<size_t>(size)) == cudaSuccess) return memory;
    cudaGetLastError();
    memory = std::aligned_alloc(kPlanAlignment, static_cast<size_t>(size));
    if (memory == nullptr) FAIL(memory, "not enough memory: {} bytes for {}", bytes, what);
    ++plain_pieces;
    return memory;
}

void free_host(void* memory) {
    if (memory == nullptr) return;
    if (forget_registered(memory)) {
        cudaHostUnregister(memory);
        std::free(memory);
        return;
    }
    cudaPointerAttributes attributes{};
    const bool pinned =
        cudaPointerGetAttributes(&attributes, memory) == cudaSuccess && attributes.type == cudaMemoryTypeHost;
    if (pinned) {
        cudaFreeHost(memory);
    } else {
        std::free(memory);
        --plain_pieces;
    }
}

bool all_pinned() { return plain_pieces == 0; }

}  // namespace quern::cuda::pack
