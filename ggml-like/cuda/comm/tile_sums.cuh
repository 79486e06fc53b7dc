// Sums over ranks inside the kernel that makes the parts (peers.h): 16 neighbouring lanes have the 16 columns of a tile of
// one row. They send a line of 128 bytes to every other rank, 8 bytes a lane, and then wait for the others'.
//
//   lanes 0 .. 15   | a, n | b, n | ... | p, n |   -> line (tile, row) in the boxes of the others
//                   | a', n | ...             |   <- line (tile, row) of the own box, polled; added in the order of the ranks
//
// Which block has a tile may change from kernel to kernel: a tile's messages are counted, by the kernel that sent one, at its end.
// The tile has two places, used in turns. A rank sends message n of a tile only in a kernel after the one in which it received
// n - 1 of all others, and these had sent n - 1 after the kernel in which they read n - 2: so nobody reads the place any more.
//
// Blocks that wait keep their SMs, but nobody waits in vain: kernels that send have no more blocks than the card has SMs (all of
// them run), every rank launches the same ones in the same order, and a later kernel's blocks come only when all have begun.
//
// Bound: one way over the link; twice the bytes.
#pragma once

#include "ggml-like/cuda/comm/packets.cuh"

namespace quern::cuda::comm {

class TileSums {
  public:
    __device__ explicit TileSums(const Peers& p) : p_(p) {}

    /// The number of the tile's next message. After wait_for_predecessor.
    __device__ __forceinline__ uint32_t number(int tile) const { return __ldcg(&p_.own->tiles[tile]) + 1; }

    /// By 16 neighbouring lanes, for columns 0 .. 15 of a tile of row `row`: the sum in the order of the ranks. A message that does not
    /// come in time: any number, and Watch::lost says so.
    __device__ __forceinline__ float sum(int tile, int row, int column, float own, uint32_t number) const {
        Waiting waiting(p_);
        for (int r = 1; r < p_.ranks; ++r) {  // everybody begins with another one
            const int to = p_.rank + r < p_.ranks ? p_.rank + r : p_.rank + r - p_.ranks;
            asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(
                             word(to, p_.rank, tile, row, column, number)),
                         "r"(__float_as_uint(own)), "r"(number)
                         : "memory");
        }
        float total = 0;
        for (int from = 0; from < p_.ranks; ++from) {
            const float v = from == p_.rank
                                ? own
                                : receive(word(p_.rank, from, tile, row, column, number), number, waiting);
            total = from == 0 ? v : __fadd_rn(total, v);
        }
        return total;
    }

    /// One thread for the tile, once all of the block have the number of the message that they send.
    __device__ __forceinline__ void count(int tile) const { atomicAdd(&p_.own->tiles[tile], 1u); }

  private:
    __device__ __forceinline__ uint2* word(int box, int from, int tile, int row, int column,
                                           uint32_t number) const {
        const int64_t place = (number & 1) * p_.ranks + from,
                      line = (place * kSumTiles + tile) * kSumRows + row;
        return reinterpret_cast<uint2*>(p_.box[box] + p_.lines_at) + line * 16 + column;
    }
    /// The 8 bytes arrive whole.
    __device__ __forceinline__ static float receive(const uint2* from, uint32_t number, Waiting& waiting) {
        uint32_t value, seen;
        do {
            asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(value), "=r"(seen)
                         : "l"(from)
                         : "memory");
        } while (seen != number && !waiting.over());
        return __uint_as_float(value);
    }

    const Peers& p_;
};

}  // namespace quern::cuda::comm
