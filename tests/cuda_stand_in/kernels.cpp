#include "cuda_stand_in/kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <vector>

#include "cuda_stand_in/device.h"
#include "cuda_stand_in/errors.h"
#include "cuda_stand_in/kernel_name.h"

namespace quern::cuda_stand_in {
namespace {

/// By the address of the host function.
std::map<const void*, KnownKernel>& known() {
    static std::map<const void*, KnownKernel> map;
    return map;
}

/// Of each object file; their addresses are the handles.
std::deque<CompiledCode>& codes() {
    static std::deque<CompiledCode> list;
    return list;
}

std::mutex allowed_mutex;  // of allowed_shared of all kernels

}  // namespace

CompiledKernel KnownKernel::code() const {
    if (compiled.empty()) return {};
    const auto it = compiled.find(device().capability());
    CompiledKernel code = it != compiled.end() ? it->second : compiled.rbegin()->second;
    if (device().major < 9) code.cluster = {1, 1, 1};
    return code;
}

KnownKernel* find_kernel(const void* host) {
    const auto it = known().find(host);
    return it == known().end() ? nullptr : &it->second;
}

void add_kernel(const void* host, const std::string& symbol, std::map<int, CompiledKernel> compiled) {
    KnownKernel kernel;
    kernel.name = kernel_name(symbol);
    kernel.symbol = symbol;
    kernel.compiled = std::move(compiled);
    known().emplace(host, std::move(kernel));
}

void remove_kernel(const void* host) { known().erase(host); }

int64_t allowed_shared(const KnownKernel& kernel) {
    const std::lock_guard lock(allowed_mutex);
    const auto it = kernel.allowed_shared.find(current_device());
    return it == kernel.allowed_shared.end() ? 0 : it->second;
}

void forget_allowed_memory() {
    const std::lock_guard lock(allowed_mutex);
    for (auto& [host, kernel] : known()) kernel.allowed_shared.clear();
}

std::vector<const Kernel*> kernels() {
    std::vector<const Kernel*> list;
    for (const auto& [host, kernel] : known()) list.push_back(&kernel);
    std::sort(list.begin(), list.end(), [](const Kernel* a, const Kernel* b) {
        return std::tie(a->name, a->symbol) < std::tie(b->name, b->symbol);
    });
    return list;
}

}  // namespace quern::cuda_stand_in

using namespace quern::cuda_stand_in;

// What the compiler's own code calls before main.
extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
    codes().push_back(read_compiled_code(wrapper));
    return reinterpret_cast<void**>(&codes().back());
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void** handle, const char* host, char*, const char* symbol, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
    std::map<int, CompiledKernel> compiled;
    for (const auto& [capability, all] : *reinterpret_cast<const CompiledCode*>(handle))
        if (const auto it = all.find(symbol); it != all.end()) compiled[capability] = it->second;
    add_kernel(host, symbol, std::move(compiled));
}

}  // extern "C"

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
    KnownKernel* kernel = find_kernel(host);
    if (kernel == nullptr)
        return fail(cudaErrorInvalidDeviceFunction, "cudaFuncSetAttribute: this is no kernel");
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    const int fixed = kernel->code().static_shared;
    if (value < 0 || value + fixed > device().shared_bytes)
        return fail(cudaErrorInvalidValue,
                    fmt::format("{} asks for {} bytes of shared memory beside {} static ones; a block has {}",
                                kernel->name, value, fixed, device().shared_bytes));
    const std::lock_guard lock(allowed_mutex);
    kernel->allowed_shared[current_device()] = value;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host) {
    const KnownKernel* kernel = find_kernel(host);
    if (kernel == nullptr)
        return fail(cudaErrorInvalidDeviceFunction, "cudaFuncGetAttributes: this is no kernel");
    // A build for other cards has no code of the kernels for sm_90a, which are known by their static memory.
    const bool unknown = !kernel->compiled.contains(device().capability());
    *attributes = {};
    attributes->sharedSizeBytes =
        unknown ? (device().capability() == 90 ? 8 : 0) : static_cast<size_t>(kernel->code().static_shared);
    attributes->maxThreadsPerBlock = kernel->code().most_threads;
    return cudaSuccess;
}
