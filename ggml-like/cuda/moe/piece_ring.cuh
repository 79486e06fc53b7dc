// Pieces of packed weights on their way into shared memory, a ring a warp: a few chunks of one tile.
//
//   PieceRing        pieces of any size, copied by cp.async; each has a barrier, so waits name the piece
//   WholePieceRing   pieces of kPieceChunks chunks. From sm_90 on the copy engine brings them, to be evicted from L2 first, which then
//                    keeps what comes again: the next kernels' code above all. Elsewhere cp.async, whose waits count groups of
//                    copies, which takes fewer instructions than barriers.
//
// (By the copy engine many pieces of less than 2 KB were up to 60 % slower.)
#pragma once

#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/moe/mixture_shapes.h"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// A barrier for the copies of one warp.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(shared_address(barrier)) : "memory");
}

/// Whole warp: the barrier's phase ends when all copies that its lanes have asked for so far are there.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Whole warp: copies `bytes`, a multiple of 16, to shared memory; the barrier's phase ends when they are there.
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

/// A ring of `depth` pieces of up to `piece` bytes, which are read in the order of their requests.
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
    /// The piece has been read: its place is free.
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

/// A ring of kPieceDepth whole pieces. Every piece that is read must be followed by one request, at the end of nothing: requests move
/// the ring on, and before sm_90 waits count them.
class WholePieceRing {
  public:
    static constexpr int kBytes = kPieceChunks * kFp4Chunk;

    /// Whole warp; `data` holds kPieceDepth * kBytes, `barriers` kPieceDepth, both this warp's own.
    __device__ __forceinline__ WholePieceRing(uint8_t* data, uint64_t* barriers, int lane)
        : data_(data), barriers_(barriers), lane_(lane) {
#if __CUDA_ARCH__ >= 900
        if (lane < kPieceDepth) init_phases(barriers + lane, 1);
        publish_phases();
        __syncwarp();
#endif
    }
    /// Whole warp: the next request; kPieceDepth of them come before the first wait. Null: of nothing.
    __device__ __forceinline__ void request(const uint8_t* from) {
#if __CUDA_ARCH__ >= 900
        if (from != nullptr && elected()) {
            arrive_and_expect(barriers_ + slot_, kBytes);
            copy_once(data_ + slot_ * kBytes, from, kBytes, barriers_ + slot_);
        }
#else
        if (from != nullptr) {
            uint8_t* to = data_ + slot_ * kBytes + 16 * lane_;
            static_assert(kBytes == 4 * 512 + 256);
#pragma unroll
            for (int i = 0; i < 4; ++i) copy_async16(to + 512 * i, from + 16 * lane_ + 512 * i);
            asm volatile(
                "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to + 2048 - 8 * lane_)),
                "l"(from + 2048 + 8 * lane_));
        }
        commit_copies();
#endif
        slot_ = slot_ + 1 == kPieceDepth ? 0 : slot_ + 1;
    }
    /// The oldest piece that was requested and not read; the next request takes its place.
    __device__ __forceinline__ const uint8_t* wait() {
#if __CUDA_ARCH__ >= 900
        wait_phase(barriers_ + slot_, parities_ >> slot_ & 1);
        parities_ ^= 1u << slot_;
#else
        wait_copies<kPieceDepth - 1>();
        __syncwarp();
#endif
        return data_ + slot_ * kBytes;
    }
    __device__ __forceinline__ void release() { __syncwarp(); }

  private:
    uint8_t* data_;
    uint64_t* barriers_;
    int lane_;
    int slot_ = 0;
    uint32_t parities_ = 0;  // of the phases that come, a bit each
};

}  // namespace quern::cuda::moe
