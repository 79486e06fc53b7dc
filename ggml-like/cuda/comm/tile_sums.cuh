// Sums over ranks inside the kernel that makes the parts (peers.h): neighbouring lanes have the 16 columns of a tile of one row. They
// send a line of 128 bytes to every other rank, 8 bytes a column, and then wait for the others'.
//
//   columns 0 .. 15   | a, n | b, n | ... | p, n |   -> line (tile, row) in the boxes of the others
//                     | a', n | ...              |   <- line (tile, row) of the own box, polled; added in the order of the ranks
//
// Who has a line may change from kernel to kernel: a line's messages are counted in device memory, by who has received one. The line has
// two places, used in turns. A rank sends message n of a line only in a kernel after the one in which it received n - 1 of all
// others, and these had sent n - 1 after the kernel in which they read n - 2: so nobody reads the place any more.
//
// Blocks that wait keep their SMs, but nobody waits in vain: kernels that send have no more blocks than run at once (product_sums and
// down_sums of cuda/variants.h), every rank launches the same ones in the same order, and a later kernel's blocks come only when all
// of its predecessor's have begun.
//
// Bound: one way over the link; twice the bytes.
#pragma once

#include "ggml-like/cuda/comm/packets.cuh"

namespace quern::cuda::comm {

/// What a lane sends and gets: some columns of the next message of a line. All that it needs is loaded as early as it can be, so that
/// nothing is between the sum and the link.
struct LinePart {
    uint32_t at = 0;  // its place in a box, in bytes: of rank 0's messages
    uint32_t number = 0;
    bool lost = false;
};

class TileSums {
  public:
    __device__ explicit TileSums(const Peers& p) : p_(p) {}

    /// From column 0 .. 15 of a tile of row `row` on. After wait_for_predecessor.
    __device__ __forceinline__ LinePart part(int tile, int row, int column) const {
        LinePart l;
        const uint32_t line = tile * kSumRows + row;
        l.number = __ldcg(&p_.own->lines[line]) + 1;
        l.lost = __ldcg(&p_.own->lost) != 0;
        l.at = static_cast<uint32_t>(p_.lines_at) + (first_of(l.number) + line) * kSumLine + column * 8;
        // The box too: constants that no cache has yet.
        asm volatile("" ::"l"(p_.box[next(p_.rank)]));
        return l;
    }

    /// By 16 neighbouring lanes, for the columns of a tile: the sum in the order of the ranks. A message that does not come in time: any
    /// number, and Watch::lost says so.
    __device__ __forceinline__ float sum(const LinePart& l, float own) const {
#pragma unroll 1
        for (int to = next(p_.rank); to != p_.rank; to = next(to))  // everybody begins with another one
            asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(place(to, p_.rank, l)),
                         "r"(__float_as_uint(own)), "r"(l.number)
                         : "memory");
        Waiting waiting(p_, l.lost);
        float total = 0;
#pragma unroll 1
        for (int from = 0; from < p_.ranks; ++from) {
            const float v = from == p_.rank ? own : receive(place(p_.rank, from, l), l.number, waiting);
            total = from == 0 ? v : __fadd_rn(total, v);
        }
        count(l, 0xffffu << (threadIdx.x & 16));
        return total;
    }
    /// By four neighbouring lanes, four columns each.
    __device__ __forceinline__ void sum_four(const LinePart& l, float (&own)[4]) const {
#pragma unroll 1
        for (int to = next(p_.rank); to != p_.rank; to = next(to)) {
            std::byte* const line = place(to, p_.rank, l);
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(line + 8 * i),
                             "r"(__float_as_uint(own[i])), "r"(l.number), "r"(__float_as_uint(own[i + 1])),
                             "r"(l.number)
                             : "memory");
        }
        Waiting waiting(p_, l.lost);
        float total[4] = {};
#pragma unroll 1
        for (int from = 0; from < p_.ranks; ++from)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float2 v = from == p_.rank
                                     ? make_float2(own[i], own[i + 1])
                                     : receive_two(place(p_.rank, from, l) + 8 * i, l.number, waiting);
                total[i] = from == 0 ? v.x : __fadd_rn(total[i], v.x);
                total[i + 1] = from == 0 ? v.y : __fadd_rn(total[i + 1], v.y);
            }
        count(l, 0xfu << (threadIdx.x & 28));
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = total[i];
    }

  private:
    __device__ __forceinline__ int next(int rank) const { return rank + 1 < p_.ranks ? rank + 1 : 0; }
    /// Lines before the message's place.
    __device__ __forceinline__ uint32_t first_of(uint32_t number) const {
        return (number & 1) * p_.ranks * (kSumTiles * kSumRows);
    }
    __device__ __forceinline__ std::byte* place(int box, int from, const LinePart& l) const {
        return p_.box[box] + (l.at + from * (kSumTiles * kSumRows * kSumLine));
    }
    /// Lanes of a line, all of which have its number: the message has come.
    __device__ __forceinline__ void count(const LinePart& l, unsigned lanes) const {
        __syncwarp(lanes);
        const uint32_t from_lines = l.at - static_cast<uint32_t>(p_.lines_at);
        if (from_lines % kSumLine == 0)
            atomicAdd(&p_.own->lines[from_lines / kSumLine - first_of(l.number)], 1u);
    }
    /// 8 bytes arrive whole.
    __device__ __forceinline__ static float receive(const std::byte* from, uint32_t number,
                                                    Waiting& waiting) {
        uint32_t value, seen;
        do {
            asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(value), "=r"(seen)
                         : "l"(from)
                         : "memory");
        } while (seen != number && !waiting.over());
        return __uint_as_float(value);
    }
    __device__ __forceinline__ static float2 receive_two(const std::byte* from, uint32_t number,
                                                         Waiting& waiting) {
        uint32_t a, first, b, second;
        do {
            asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a), "=r"(first), "=r"(b), "=r"(second)
                         : "l"(from)
                         : "memory");
        } while ((first != number || second != number) && !waiting.over());
        return make_float2(__uint_as_float(a), __uint_as_float(b));
    }

    const Peers& p_;
};

}  // namespace quern::cuda::comm
