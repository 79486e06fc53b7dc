// Small messages between ranks (peers.h): packets of two numbers, which a thread sends and receives by itself.
#pragma once

#include "ggml-like/cuda/comm/peers.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::comm {

inline constexpr int kPolls = 1024;  // between two looks at the clock and at the host's word

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/// How long somebody waits for one message.
class Waiting {
  public:
    __device__ explicit Waiting(const Peers& p) : Waiting(p, __ldcg(&p.own->lost) != 0) {}
    /// lost: Progress::lost, loaded before.
    __device__ Waiting(const Peers& p, bool lost) : p_(p), lost_(lost) {}

    /// Whether to give up; called after each look that was in vain.
    __device__ bool over() {
        if (lost_) return true;
        if (++polls_ % kPolls != 0) return false;
        const uint64_t now = nanoseconds();
        if (begun_ == 0) begun_ = now;
        if (p_.watch->abort == 0 && now - begun_ < p_.patience) return false;
        lost_ = true;
        p_.own->lost = 1;
        p_.watch->lost[p_.rank] = 1;
        __threadfence_system();
        return true;
    }

  private:
    const Peers& p_;
    bool lost_;
    unsigned polls_ = 0;
    uint64_t begun_ = 0;
};

/// A block's part of one message of all ranks, four numbers a thread at a time. Blocks count their messages, so numbers at one
/// place of a message must always be those of the same block: kernels have kSmallThreads threads and packet_blocks() blocks,
/// and a thread takes the fours first(), first() + kStep, ...
class Packets {
  public:
    static constexpr int64_t kStep = int64_t{kSmallBlocks} * kSmallThreads;
    __device__ static int64_t first() {
        return static_cast<int64_t>(blockIdx.x) * kSmallThreads + threadIdx.x;
    }

    /// After wait_for_predecessor.
    __device__ explicit Packets(const Peers& p)
        : p_(p), number_(__ldcg(&p.own->small[blockIdx.x]) + 1), waiting_(p) {}

    /// To all other ranks.
    __device__ __forceinline__ void send(int64_t four, const float4& v) const {
        send_pair(2 * four, make_float2(v.x, v.y));
        send_pair(2 * four + 1, make_float2(v.z, v.w));
    }
    /// The sum in the order of the ranks; `own`: what this rank has sent.
    __device__ __forceinline__ float4 sum(int64_t four, const float4& own) {
        const float2 low = sum_pair(2 * four, make_float2(own.x, own.y)),
                     high = sum_pair(2 * four + 1, make_float2(own.z, own.w));
        return make_float4(low.x, low.y, high.x, high.y);
    }
    /// Whole block, when all has been received.
    __device__ __forceinline__ void end() const {
        __syncthreads();
        if (threadIdx.x == 0) p_.own->small[blockIdx.x] = number_;
    }

  private:
    __device__ __forceinline__ void send_pair(int64_t pair, float2 v) const {
        for (int r = 1; r < p_.ranks; ++r) {  // everybody begins with another one
            asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                             place((p_.rank + r) % p_.ranks, p_.rank, pair)),
                         "r"(__float_as_uint(v.x)), "r"(number_), "r"(__float_as_uint(v.y)), "r"(number_)
                         : "memory");
        }
    }
    __device__ __forceinline__ float2 sum_pair(int64_t pair, float2 own) {
        float2 total = make_float2(0, 0);
        for (int from = 0; from < p_.ranks; ++from) {
            const float2 v = from == p_.rank ? own : receive(from, pair);
            total = from == 0 ? v : make_float2(__fadd_rn(total.x, v.x), __fadd_rn(total.y, v.y));
        }
        return total;
    }
    __device__ __forceinline__ uint4* place(int box, int from, int64_t pair) const {
        return reinterpret_cast<uint4*>(p_.box[box]) + ((number_ & 1) * p_.ranks + from) * kSmallPairs + pair;
    }
    /// Halves of a packet, 8 bytes each, arrive whole.
    __device__ __forceinline__ float2 receive(int from, int64_t pair) {
        const uint4* packet = place(p_.rank, from, pair);
        uint32_t a, first, b, second;
        do {
            asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a), "=r"(first), "=r"(b), "=r"(second)
                         : "l"(packet)
                         : "memory");
        } while ((first != number_ || second != number_) && !waiting_.over());
        return make_float2(__uint_as_float(a), __uint_as_float(b));
    }

    const Peers& p_;
    const uint32_t number_;
    Waiting waiting_;
};

/// Whether so many numbers go in packets, and the blocks of a grid for them.
inline bool fits_packets(int64_t count) { return count <= 2 * kSmallPairs; }
inline unsigned packet_blocks(int64_t count) {
    const int64_t blocks = (count / 4 + kSmallThreads - 1) / kSmallThreads;
    return static_cast<unsigned>(blocks < kSmallBlocks ? blocks : kSmallBlocks);
}

}  // namespace quern::cuda::comm
