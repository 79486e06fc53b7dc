// Launching kernels, with programmatic dependent launch where the card has it (sm_90 on).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "ggml-like/cuda/context.h"

namespace quern::cuda {

/// Throws quern::Error(device) naming `what` unless code is cudaSuccess. Defined in cuda_backend.cpp.
void check_launch(cudaError_t code, const char* what);
/// Throws: a kernel of `op` does not take `what` ("F16 caches"). Defined in cuda_backend.cpp.
[[noreturn]] void unsupported(const char* op, const char* what);

/// Memory of which a kernel reads each byte once, as dense weights of a step of few rows. In the L2 cache it makes room first,
/// so that what the next kernels need stays there, their code above all: a layer's kernels have more of it than an SM's instruction
/// cache holds, and from memory it comes at half of the speed. (One row's are small enough: no gain.) Of more than
/// Context::window_bytes the beginning.
struct ReadOnce {
    const void* data = nullptr;
    int64_t bytes = 0;
};

/// Launches on context.stream. `what`: the kernel's name, for messages and bench --ops. The kernel may start before its
/// predecessor ends: it calls wait_for_predecessor() (ptx.cuh) before it touches anything but weights, inputs of the step as they were
/// uploaded, state of earlier steps, what cuda/moe/moe.h says of experts and what it has been told is there (ptx/told.cuh), and every
/// kernel calls it.
template <typename... P, typename... A>
void launch_reading(Context& context, const ReadOnce& read, const char* what, void (*kernel)(P...), dim3 grid,
                    dim3 block, int shared_bytes, A... arguments) {
    if (shared_bytes > context.shared_bytes) unsupported(what, "a card with so little shared memory");
    const auto set = [&](cudaFuncAttribute attribute, int value) {
        check_launch(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value), what);
    };
    if (shared_bytes > 24 * 1024)  // past 48 KB with the kernel's static memory
        set(cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    // An SM that leaves more to its L1 cache has no room for the next kernel beside this one.
    set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = context.stream;
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (context.capability >= 90) {
        cudaLaunchAttribute& early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (const int64_t bytes = std::min(read.bytes, context.window_bytes); bytes > 0) {
        cudaLaunchAttribute& window = attributes[config.numAttrs++];
        window.id = cudaLaunchAttributeAccessPolicyWindow;
        window.val.accessPolicyWindow = {const_cast<void*>(read.data), static_cast<size_t>(bytes), 1.0f,
                                         cudaAccessPropertyStreaming, cudaAccessPropertyStreaming};
    }
    check_launch(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...), what);
    if (Launched* l = context.launched; l != nullptr && l->count < Launched::kMax)
        l->kernel[l->count++] = what;
}

/// The same, of a kernel that reads nothing of the kind.
template <typename... P, typename... A>
void launch(Context& context, const char* what, void (*kernel)(P...), dim3 grid, dim3 block, int shared_bytes,
            A... arguments) {
    launch_reading(context, {}, what, kernel, grid, block, shared_bytes, arguments...);
}

}  // namespace quern::cuda
