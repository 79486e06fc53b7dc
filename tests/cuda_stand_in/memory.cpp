// Device memory is mapped without a reservation: pages that nobody writes take nothing and read as zeros.
#include "cuda_stand_in/memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "cuda_stand_in/device.h"
#include "cuda_stand_in/errors.h"
#include "cuda_stand_in/pace.h"
#include "cuda_stand_in/streams.h"

namespace quern::cuda_stand_in {
namespace {

constexpr uintptr_t kPage = 4096;

struct Block {
    int64_t bytes;
    int device;  // kHost: memory of the host; kRegistered: of the program, pinned
};
constexpr int kHost = -1, kRegistered = -2;

/// By address.
std::map<uintptr_t, Block>& blocks() {
    static std::map<uintptr_t, Block> map;
    return map;
}

std::mutex blocks_mutex;  // host memory may be taken on any thread

uintptr_t address(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

/// The block that has all of these bytes; null: none has.
const Block* block_of(const void* memory, size_t bytes) {
    const std::lock_guard lock(blocks_mutex);
    auto it = blocks().upper_bound(address(memory));
    if (it == blocks().begin()) return nullptr;
    --it;
    const bool inside = address(memory) + bytes <= it->first + static_cast<uintptr_t>(it->second.bytes);
    return inside ? &it->second : nullptr;
}

bool on_device(const void* memory, size_t bytes) {
    const Block* block = block_of(memory, bytes);
    return block != nullptr && block->device == current_device();
}

cudaError_t take(void** memory, size_t bytes, int device) {
    void* mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "the host maps no more memory");
    const std::lock_guard lock(blocks_mutex);
    blocks()[address(mapped)] = {static_cast<int64_t>(bytes), device};
    *memory = mapped;
    return cudaSuccess;
}

cudaError_t give_back(void* memory, const char* call, bool host) {
    if (memory == nullptr) return cudaSuccess;
    const std::lock_guard lock(blocks_mutex);
    const auto it = blocks().find(address(memory));
    if (it == blocks().end() || (it->second.device == kHost) != host)
        return fail(cudaErrorInvalidValue, std::string(call) + ": this memory was not taken so");
    munmap(memory, static_cast<size_t>(it->second.bytes));
    blocks().erase(it);
    return cudaSuccess;
}

/// Whole pages are thrown away: fresh ones are zeros.
void zero(void* memory, size_t bytes) {
    const uintptr_t begin = address(memory), end = begin + bytes;
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
    if (first >= last) {
        std::memset(memory, 0, bytes);
        return;
    }
    std::memset(memory, 0, first - begin);
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    std::memset(reinterpret_cast<void*>(last), 0, end - last);
}

cudaError_t set(void* memory, int value, size_t bytes, const char* call) {
    if (!on_device(memory, bytes))
        return fail(cudaErrorInvalidValue, std::string(call) + ": not all of it is this device's memory");
    if (value == 0)
        zero(memory, bytes);
    else
        std::memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (kind != cudaMemcpyDeviceToHost && !on_device(to, bytes))
        return fail(cudaErrorInvalidValue, "cudaMemcpyAsync: the target is not this device's memory");
    const Block* source = block_of(from, bytes);
    const bool peer = kind == cudaMemcpyDeviceToDevice && source != nullptr && reads_peer(source->device);
    if (kind != cudaMemcpyHostToDevice && !on_device(from, bytes) && !peer)
        return fail(cudaErrorInvalidValue, "cudaMemcpyAsync: the source is not this device's memory");
    std::memcpy(to, from, bytes);
    if (kind == cudaMemcpyDeviceToHost) downloaded(to, bytes);
    return cudaSuccess;
}

}  // namespace

int64_t taken_bytes(int device) {
    const std::lock_guard lock(blocks_mutex);
    int64_t bytes = 0;
    for (const auto& [at, block] : blocks()) bytes += block.device == device ? block.bytes : 0;
    return bytes;
}

}  // namespace quern::cuda_stand_in

using namespace quern::cuda_stand_in;

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    if (capturing()) return refuse_in_capture("cudaMalloc");
    if (taken_bytes(current_device()) + static_cast<int64_t>(bytes) > kDeviceBytes)
        return fail(cudaErrorMemoryAllocation, "out of memory");
    return take(memory, bytes, current_device());
}
cudaError_t cudaFree(void* memory) { return give_back(memory, "cudaFree", false); }
cudaError_t cudaMallocHost(void** memory, size_t bytes) { return take(memory, bytes, kHost); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return take(memory, bytes, kHost); }
cudaError_t cudaHostGetDevicePointer(void** seen, void* memory, unsigned) {
    const Block* block = block_of(memory, 1);
    if (block == nullptr || block->device != kHost)
        return fail(cudaErrorInvalidValue, "cudaHostGetDevicePointer: this memory was not taken so");
    *seen = memory;
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
    const std::lock_guard lock(blocks_mutex);
    if (!blocks().try_emplace(address(memory), Block{static_cast<int64_t>(bytes), kRegistered}).second)
        return fail(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister: this memory is pinned already");
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
    const std::lock_guard lock(blocks_mutex);
    const auto it = blocks().find(address(memory));
    if (it == blocks().end() || it->second.device != kRegistered)
        return fail(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister: this memory was not pinned");
    blocks().erase(it);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return give_back(memory, "cudaFreeHost", true); }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
    const Block* block = block_of(memory, 1);
    *attributes = {};
    attributes->type = block == nullptr    ? cudaMemoryTypeUnregistered
                       : block->device < 0 ? cudaMemoryTypeHost
                                           : cudaMemoryTypeDevice;
    return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    if (capturing()) return refuse_in_capture("cudaMemset");
    return set(memory, value, bytes, "cudaMemset");
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    return in_order(stream, cudaGraphNodeTypeMemset,
                    [=] { return set(memory, value, bytes, "cudaMemsetAsync"); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return in_order(stream, cudaGraphNodeTypeMemcpy, [=] { return copy(to, from, bytes, kind); });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    return in_order(stream, cudaGraphNodeTypeMemcpy, [=] {
        if (to_pitch < width || from_pitch < width)
            return fail(cudaErrorInvalidPitchValue, "cudaMemcpy2DAsync: rows overlap");
        for (size_t row = 0; row < height; ++row) {
            const cudaError_t code =
                copy(static_cast<std::byte*>(to) + row * to_pitch,
                     static_cast<const std::byte*>(from) + row * from_pitch, width, kind);
            if (code != cudaSuccess) return code;
        }
        return cudaSuccess;
    });
}
