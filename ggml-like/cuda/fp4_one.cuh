// y = W h for one row of h and NVFP4 weights of which a block's tiles fit into shared memory together: all
// are under way before the kernel waits, nothing is asked for later, and warps meet once. Wider matrices and
// more rows: dense_rows.cuh, with the same bits.
//
//   block b owns tiles b, b + grid, ...; of each, warp w takes chunk pairs w, w + 16, ...
#pragma once

#include "ggml-like/cuda/dense_rows.cuh"

namespace quern::cuda {

inline constexpr int kOnePieces = 6;  // of a warp: more than half of an SM for a block, below 132 KB
inline constexpr int kOnePieceBytes = kPieceBytes<Kind::nvfp4>;

/// How a launch divides a part.
struct OneShape {
    int chunks, grid, turns, steps;  // tiles of a block, pieces of a warp and tile

    OneShape(const Context& c, const Part& part, int n)
        : chunks(n),
          grid(min(c.sms, part.tiles)),
          turns((part.tiles + grid - 1) / grid),
          steps(n / (kWarps * kPieceChunks<Kind::nvfp4>)) {}
    int bytes() const {
        return kWarps * kOnePieces * kOnePieceBytes + chunks * kChunkCols * 2 +
               kOnePieces * kWarps * kTileRows * static_cast<int>(sizeof(float));
    }
};

inline bool fp4_one_fits(const Context& c, const Part& part, int chunks) {
    if (part.kind != Kind::nvfp4 || part.tiles == 0 || chunks % (kWarps * kPieceChunks<Kind::nvfp4>) != 0)
        return false;
    const OneShape s(c, part, chunks);
    return s.turns * s.steps <= kOnePieces && s.bytes() + kDenseStatic <= c.shared_bytes;
}

/// Where columns lie for multiply_fp4.
struct PairOrder {
    static __device__ __forceinline__ int place(int k) {
        return (k & ~31) + ((k & 16) >> 2) + ((k & 6) << 2) + ((k & 8) >> 2) + (k & 1);
    }
};

/// prologue and finish as in dense_rows. kOneStep: s.steps is 1.
template <bool kOneStep, typename Prologue, typename Finish>
__device__ __forceinline__ void fp4_one(const Part& part, const OneShape& s, Prologue&& prologue,
                                        const Finish& finish) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = kOneStep ? 1 : s.steps;
    uint8_t* ring = shared + warp * kOnePieces * kOnePieceBytes;
    bf16* h = reinterpret_cast<bf16*>(shared + kWarps * kOnePieces * kOnePieceBytes);
    float* sums = reinterpret_cast<float*>(h + s.chunks * kChunkCols);  // [turn][warp][16]

    allow_successor();
    constexpr int kStepBytes = kWarps * kOnePieceBytes;
    const uint8_t* from = part.data + static_cast<int64_t>(blockIdx.x) * s.chunks * kFp4Chunk +
                          warp * kOnePieceBytes + 16 * lane;
    const int64_t jump = (static_cast<int64_t>(gridDim.x) * s.chunks * kFp4Chunk) - (steps - 1) * kStepBytes;
    int tile = blockIdx.x;
#pragma unroll
    for (int i = 0, step = 0; i < kOnePieces; ++i) {
        if (tile < part.tiles) {
            uint8_t* to = ring + i * kOnePieceBytes + 16 * lane;
            copy_async16(to, from);
            copy_async16(to + 512, from + 512);
            if (lane < (kOnePieceBytes - 1024) / 16) copy_async16(to + 1024, from + 1024);
        }
        commit_copies();
        if (++step == steps)
            step = 0, tile += gridDim.x, from += jump;
        else
            from += kStepBytes;
    }
    prologue.early();
    // The end: thread = row r of the tile of turn `turn`.
    const int turn_of = threadIdx.x / kTileRows, r = threadIdx.x % kTileRows;
    const int row = (blockIdx.x + turn_of * gridDim.x) * kTileRows + r;
    const bool adds = turn_of < s.turns && row < part.rows;
    const float factor = adds ? part.factor[row] : 0.0f;
    wait_for_predecessor();
    const float loaded = adds ? finish.load(row, 0) : 0.0f;
    prologue(h, 0);
    __syncthreads();

    const uint8_t* x = reinterpret_cast<const uint8_t*>(h) + warp * 256 + 16 * (lane & 3);
    const uint8_t* piece = ring;
    int turn = 0;
#pragma unroll 1
    for (int at = blockIdx.x; at < part.tiles; at += gridDim.x, ++turn) {
        float acc[4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step, piece += kOnePieceBytes) {
            wait_copies<kOnePieces - 1>();
            __syncwarp();
            multiply_fp4<true>(piece, x + step * kWarps * 256, lane, acc);
            multiply_fp4<true>(piece + kFp4Chunk, x + step * kWarps * 256 + 128, lane, acc);
            commit_copies();
        }
        if ((lane & 3) == 0) {
            float* to = sums + (turn * kWarps + warp) * kTileRows + (lane >> 2);
            to[0] = acc[0];
            to[8] = acc[2];
        }
    }
    __syncthreads();
    if (!adds) return;
    const float* sum = sums + turn_of * kWarps * kTileRows + r;
    finish.store(row, 0, loaded, add_parts(kWarps, sum, kTileRows) * factor);
}

}  // namespace quern::cuda
