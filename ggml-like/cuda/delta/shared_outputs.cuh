// A head's outputs, which the norm needs all of, where kSplit blocks of a cluster make them: every block sends its own to all.
//
// Outputs of one row, or of one batch of rows, take turns with those of the next in two places, each with a barrier that counts
// what has come; so nobody waits until writes are visible on the whole card, which the stores of S would make long.
#pragma once

#include "ggml-like/cuda/ptx/cluster.cuh"

namespace quern::cuda::delta {

using namespace ptx;

/// In shared memory.
template <int kSplit>
struct SharedOutputs {
    uint64_t here[2];

    /// All threads, at the kernel's begin.
    __device__ __forceinline__ void begin() {
        if constexpr (kSplit > 1) {
            if (threadIdx.x < 2) init_phases(here + threadIdx.x, 1);
            if (threadIdx.x < 2) publish_phases();
            __syncwarp();
            cluster_arrive_only();
        }
    }
    /// Once after begin: all blocks have begun, so that their shared memory may be written.
    __device__ __forceinline__ void wait_for_all_blocks() const {
        if constexpr (kSplit > 1) cluster_wait();
    }
    /// Turn by turn from 0 on: `count` outputs come from all blocks together.
    __device__ __forceinline__ void expect(int turn, int count) {
        if (kSplit > 1 && threadIdx.x == 0)
            arrive_and_expect(here + turn % 2, static_cast<uint32_t>(count * sizeof(float)));
    }
    /// Where a thread's output of a turn goes: `to` of every block. Known before there is an output.
    struct Target {
        float* own;
        uint32_t to[kSplit], counts[kSplit];

        __device__ __forceinline__ Target(const SharedOutputs& outputs, int turn, float* at) : own(at) {
            if constexpr (kSplit > 1)
#pragma unroll
                for (int rank = 0; rank < kSplit; ++rank)
                    to[rank] = peer_address(at, rank),
                    counts[rank] = peer_address(outputs.here + turn % 2, rank);
        }
        /// `further` floats behind `to`.
        __device__ __forceinline__ void send(float value, int further = 0) const {
            if constexpr (kSplit == 1) {
                own[further] = value;
            } else {
#pragma unroll
                for (int rank = 0; rank < kSplit; ++rank)
                    send_to_peer(to[rank] + 4 * further, value, counts[rank]);
            }
        }
    };
    /// All threads: the outputs of this turn have come. So all warps of the block have done their part of it.
    __device__ __forceinline__ void wait(int turn) {
        if constexpr (kSplit == 1)
            __syncthreads();
        else
            wait_cluster_phase(here + turn % 2, turn / 2 & 1);
    }
};

}  // namespace quern::cuda::delta
