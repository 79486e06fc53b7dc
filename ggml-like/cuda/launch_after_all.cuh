// Launching a kernel that starts when all before it have ended, their writes visible: without programmatic dependent launch. Kernels
// after it may read what these wrote before they wait.
#pragma once

#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda {

/// As launch().
template <typename... P, typename... A>
void launch_after_all(Context& context, const char* what, void (*kernel)(P...), dim3 grid, dim3 block,
                      int shared_bytes, A... arguments) {
    if (shared_bytes > context.shared_bytes) unsupported(what, "a card with so little shared memory");
    if (shared_bytes > 24 * 1024)
        check_launch(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                     what);
    kernel<<<grid, block, static_cast<size_t>(shared_bytes), context.stream>>>(static_cast<P>(arguments)...);
    check_launch(cudaGetLastError(), what);
    if (Launched* l = context.launched; l != nullptr && l->count < Launched::kMax)
        l->kernel[l->count++] = what;
}

}  // namespace quern::cuda
