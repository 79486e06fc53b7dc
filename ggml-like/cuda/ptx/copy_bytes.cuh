// Copies of consecutive bytes by the copy engine (sm_90), and the lane that asks for them.
#pragma once

#include "ggml-like/cuda/ptx/phases.cuh"

namespace quern::cuda::ptx {

/// Whole warp, from sm_90 on: true in one lane, the same each time. What only this lane does needs no loop over lanes: ptxas
/// makes one of 30 instructions a lane for copies behind a plain comparison.
__device__ __forceinline__ bool elected() {
    uint32_t yes = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(yes));
#endif
    return yes != 0;
}

/// So many consecutive bytes, a multiple of 16, to shared memory, by the copy engine.
__device__ __forceinline__ void copy_bytes(void* to_shared, const void* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to_shared)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
#endif
}

/// The policy of the L2 cache for bytes that no later kernel reads: evicted first. (What createpolicy makes of evict_first and all of the
/// bytes, CUTLASS's TMA::CacheHintSm90::EVICT_FIRST; a constant, since ptxas 13.0 may lose a policy that is made long before its use.)
inline constexpr uint64_t kReadOnce = 0x12f0000000000000;

/// The same of bytes that no later kernel reads.
__device__ __forceinline__ void copy_once(void* to_shared, const void* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(shared_address(to_shared)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(kReadOnce)
        : "memory");
#endif
}

}  // namespace quern::cuda::ptx
