// Pieces of packed weights on their way into shared memory, a ring a warp, each piece with a barrier of its
// own. (Bulk copies were measured here as well: 2 % faster for pieces of 2 KB and more, up to 60 % slower for
// many smaller ones.)
#pragma once

#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::moe {

using namespace ptx;

inline constexpr int kMaxPieces = 8;  // of one ring

/// For the copies of one warp.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(shared_address(barrier)) : "memory");
}

/// Whole warp: the barrier's phase ends when all copies are there that its lanes asked for so far.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Whole warp: `bytes`, a multiple of 16, to shared memory; the barrier's phase ends when they are there.
__device__ __forceinline__ void copy_piece(uint8_t* to, const uint8_t* from, int bytes, uint64_t* barrier,
                                           int lane) {
    for (int i = 16 * lane; i < bytes; i += 512) copy_async16(to + i, from + i);
    arrive_with_copies(barrier);
}

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (done == 0);
}

/// One warp's ring of `depth` pieces of up to `piece` bytes. Pieces are read in the order of their requests.
class PieceRing {
  public:
    /// Whole warp; `data` holds depth * piece bytes, `barriers` kMaxPieces, both this warp's own.
    __device__ __forceinline__ PieceRing(uint8_t* data, uint64_t* barriers, int piece, int depth, int lane)
        : data_(data), barriers_(barriers), piece_(piece), depth_(depth), lane_(lane) {
        if (lane < depth) init_barrier(barriers + lane);
        __syncwarp();
    }
    /// At most `depth` requests may be open.
    __device__ __forceinline__ void request(const uint8_t* from, int bytes) {
        copy_piece(data_ + to_ * piece_, from, bytes, barriers_ + to_, lane_);
        to_ = to_ + 1 == depth_ ? 0 : to_ + 1;
    }
    __device__ __forceinline__ const uint8_t* wait() {
        wait_barrier(barriers_ + at_, parity_);
        return data_ + at_ * piece_;
    }
    /// Gives the piece's place free.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (++at_ == depth_) at_ = 0, parity_ ^= 1;
    }

  private:
    uint8_t* data_;
    uint64_t* barriers_;
    int piece_, depth_, lane_;
    int at_ = 0, to_ = 0;
    uint32_t parity_ = 0;
};

}  // namespace quern::cuda::moe
