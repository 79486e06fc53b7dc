// Barriers in shared memory (mbarrier) that count arrivals and bytes: between warps of a block, for copies that the copy engine
// brings, and for what blocks of a cluster send each other. On cards before sm_90 these functions do
// nothing; only the fence is called there.
//
// A phase ends with as many arrivals as the barrier was made for and all bytes that were announced; bytes may come before
// they are announced. Phases take turns: the first has parity 0.
#pragma once

#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::ptx {

__device__ __forceinline__ void init_phases(uint64_t* barrier, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
#endif
}
/// After init_phases: makes the barrier known to the copy engine and, with a barrier of the cluster, to its blocks.
__device__ __forceinline__ void publish_phases() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void wait_phase(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::
            "r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}
/// The same for bytes that other blocks of the cluster sent (cluster.cuh).
__device__ __forceinline__ void wait_cluster_phase(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}\n" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}

/// What this thread wrote to shared memory, by ordinary stores or cp.async that it has waited for, comes before what products of
/// warpgroups read there and the copy engine writes there after the next barrier.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace quern::cuda::ptx
