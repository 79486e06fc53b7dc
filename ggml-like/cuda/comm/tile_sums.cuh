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

/// A number of the next message of a tile: what one lane sends and gets. What it needs to know is loaded as early as it can be, so that
/// nothing is between the sum and the link.
struct TileWord {
    uint32_t at = 0;  // its place in a box, in bytes: of rank 0's messages
    uint32_t number = 0;
    bool lost = false;
};

class TileSums {
  public:
    __device__ explicit TileSums(const Peers& p) : p_(p) {}

    /// Column 0 .. 15 of a tile of row `row`. After wait_for_predecessor.
    __device__ __forceinline__ TileWord word(int tile, int row, int column) const {
        TileWord w;
        w.number = __ldcg(&p_.own->tiles[tile]) + 1;
        w.lost = __ldcg(&p_.own->lost) != 0;
        const uint32_t line = ((w.number & 1) * p_.ranks * kSumTiles + tile) * kSumRows + row;
        w.at = static_cast<uint32_t>(p_.lines_at) + line * kSumLine + column * 8;
        // The box too: constants that no cache has yet.
        asm volatile("" ::"l"(p_.box[next(p_.rank)]));
        return w;
    }

    /// By 16 neighbouring lanes, for the columns of a tile: the sum in the order of the ranks. A message that does not come in time: any
    /// number, and Watch::lost says so.
    __device__ __forceinline__ float sum(const TileWord& w, float own) const {
#pragma unroll 1
        for (int to = next(p_.rank); to != p_.rank; to = next(to))  // everybody begins with another one
            asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(place(to, p_.rank, w)),
                         "r"(__float_as_uint(own)), "r"(w.number)
                         : "memory");
        Waiting waiting(p_, w.lost);
        float total = 0;
#pragma unroll 1
        for (int from = 0; from < p_.ranks; ++from) {
            const float v = from == p_.rank ? own : receive(place(p_.rank, from, w), w.number, waiting);
            total = from == 0 ? v : __fadd_rn(total, v);
        }
        return total;
    }

    /// One thread for the tile, once all of the block have the number of the message that they send.
    __device__ __forceinline__ void count(int tile) const { atomicAdd(&p_.own->tiles[tile], 1u); }

  private:
    __device__ __forceinline__ int next(int rank) const { return rank + 1 < p_.ranks ? rank + 1 : 0; }
    __device__ __forceinline__ std::byte* place(int box, int from, const TileWord& w) const {
        return p_.box[box] + (w.at + from * (kSumTiles * kSumRows * kSumLine));
    }
    /// The 8 bytes arrive whole.
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

    const Peers& p_;
};

}  // namespace quern::cuda::comm
