// Clusters: blocks that run together and reach each other's shared memory. On cards before sm_90 these functions do
// nothing, and no kernel calls them.
#pragma once

#include <cstdint>

#include "ggml-like/cuda/ptx/phases.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER_OF(n) __cluster_dims__(n, 1, 1)
#else
#define CLUSTER_OF(n)
#endif

namespace quern::cuda::ptx {

/// The two halves of a barrier of the cluster: after the wait, every block sees what any wrote to shared memory before
/// it arrived.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}
/// An arrival that tells the others of nothing but itself, and of barriers made before publish_phases (phases.cuh). The other one
/// waits, on an H200 half a microsecond or more, until everything that its thread has written is visible on the whole card.
__device__ __forceinline__ void cluster_arrive_only() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
/// Of the block.
__device__ __forceinline__ int cluster_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return static_cast<int>(rank);
}

/// Reads the float4 at the same shared address in block `rank` of the cluster.
__device__ __forceinline__ float4 load_of_block(uint32_t address, int rank) {
    float4 v{};
#if __CUDA_ARCH__ >= 900
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
#endif
    return v;
}
/// Reads the float2 at the same shared address in block `rank` of the cluster.
__device__ __forceinline__ float2 peer_value(uint32_t address, int rank) {
    float2 v{};
#if __CUDA_ARCH__ >= 900
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
#endif
    return v;
}
/// The same shared address in block `rank` of the cluster.
__device__ __forceinline__ uint32_t peer_address(const void* p, int rank) {
    uint32_t at = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
#endif
    return at;
}
/// Sends a float to an address of another block, whose barrier at `counts` counts its 4 bytes.
__device__ __forceinline__ void send_to_peer(uint32_t to, float value, uint32_t counts) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
                 "f"(value), "r"(counts)
                 : "memory");
#endif
}
/// Sends a float to the same shared address of block `rank`, whose barrier at the same address as `barrier` counts its 4 bytes.
__device__ __forceinline__ void send_to_block(float* to, int rank, float value, const uint64_t* barrier) {
    send_to_peer(peer_address(to, rank), value, peer_address(barrier, rank));
}

}  // namespace quern::cuda::ptx
