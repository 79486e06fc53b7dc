// Counts in memory by which a kernel tells the next, which has begun early, of parts of its results.
//
// The next kernel's blocks begin once all of this one's have (programmatic dependent launch), so whoever waits for a count waits for blocks
// that run. Counts are zero before the run.
#pragma once

#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::ptx {

/// One thread: what it wrote, and what others wrote before a barrier that it has passed since, comes before the count.
__device__ __forceinline__ void tell(int* count) {
    asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

/// How many have told by now. What they wrote comes before what this thread reads or, by a barrier, lets others read after this.
__device__ __forceinline__ int told_by_now(const int* count) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    return now;
}
/// And before what this thread asks the copy engine for.
__device__ __forceinline__ void see_told() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
/// Returns when `wanted` have told.
__device__ __forceinline__ void wait_until_told(const int* count, int wanted) {
    while (told_by_now(count) < wanted) continue;
}

}  // namespace quern::cuda::ptx
