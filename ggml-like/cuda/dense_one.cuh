// y = W h for one row of h and matrices of few tiles a block: dense_rows.cuh with less around it, and the
// same bits. Sums of all tiles are kept, warps meet once, and what the end needs is loaded at the start.
// NVFP4: a block's tiles are all under way before the kernel waits.
//
//   block b owns tiles b, b + grid, ...; of each, warp w takes pieces w, w + 16, ...
#pragma once

#include "ggml-like/cuda/dense_rows.cuh"

namespace quern::cuda {

inline constexpr int kOneTurns = 8;  // tiles of a block

/// How a launch divides a part. kAhead: as in kPieces; others leave room for the next kernel's block.
template <Kind K, bool kAhead>
struct OneShape {
    static constexpr int kRing = kAhead ? kPieces<K, 1, true, true> : K == Kind::bf16 ? 2 : 3;
    static constexpr bool kRefill = K != Kind::nvfp4;
    int chunks, grid, turns, steps;  // tiles of a block, pieces of a warp and tile

    OneShape(const Context& c, const Part& part, int n)
        : chunks(n),
          grid(min(c.sms, part.tiles)),
          turns((part.tiles + grid - 1) / grid),
          steps(n / (kWarps * kPieceChunks<K>)) {}
    int bytes() const {
        return kWarps * kRing * kPieceBytes<K> + chunks * kChunkCols * 2 +
               turns * kWarps * kTileRows * static_cast<int>(sizeof(float));
    }
};

template <Kind K, bool kAhead>
bool dense_one_fits(const Context& c, const Part& part, int chunks) {
    if (part.tiles == 0 || chunks % (kWarps * kPieceChunks<K>) != 0) return false;
    const OneShape<K, kAhead> s(c, part, chunks);
    if (!s.kRefill && s.turns * s.steps > s.kRing) return false;
    return s.turns <= kOneTurns && s.bytes() + kDenseStatic <= c.shared_bytes;
}

/// Where columns lie for multiply_fp4.
struct PairOrder {
    static __device__ __forceinline__ int place(int k) {
        return (k & ~31) + ((k & 16) >> 2) + ((k & 6) << 2) + ((k & 8) >> 2) + (k & 1);
    }
};
template <Kind K>
using OneOrder = std::conditional_t<K == Kind::nvfp4, PairOrder, PlainOrder>;

/// acc += piece times x; `x`: columns of the piece.
template <Kind K>
__device__ __forceinline__ void multiply_piece(const uint8_t* piece, const bf16* x, int lane,
                                               float (&acc)[4]) {
#pragma unroll
    for (int k = 0; k < kPieceChunks<K>; ++k) {
        const uint8_t* chunk = piece + k * chunk_bytes(K);
        if constexpr (K == Kind::nvfp4) {
            multiply_fp4<true>(chunk, reinterpret_cast<const uint8_t*>(x) + k * 128 + 16 * (lane & 3), lane,
                               acc);
        } else {
            const bf16* const row[1] = {x};
            multiply_chunk<K, 1>(chunk, row, k * kChunkCols, lane, reinterpret_cast<float(&)[1][4]>(acc));
        }
    }
}

/// prologue and finish as in dense_rows.
template <Kind K, bool kAhead, typename Prologue, typename Finish>
__device__ __forceinline__ void dense_one(const Part& part, const OneShape<K, kAhead>& s, Prologue&& prologue,
                                          const Finish& finish) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int kRing = OneShape<K, kAhead>::kRing, kBytes = kPieceBytes<K>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* ring = shared + warp * kRing * kBytes;
    bf16* h = reinterpret_cast<bf16*>(shared + kWarps * kRing * kBytes);
    float* sums = reinterpret_cast<float*>(h + s.chunks * kChunkCols);  // [turn][warp][16]

    allow_successor();
    const int64_t tile_bytes = static_cast<int64_t>(s.chunks) * chunk_bytes(K);
    const uint8_t* from = part.data + blockIdx.x * tile_bytes + warp * kBytes + 16 * lane;
    const int64_t jump = gridDim.x * tile_bytes - (s.steps - 1) * (kWarps * kBytes);
    int tile = blockIdx.x, step = 0;  // of the next piece
    const auto request = [&](uint8_t* to) {
        if (tile < part.tiles) {
#pragma unroll
            for (int i = 0; i < kBytes; i += 512)
                if (i + 512 <= kBytes || i + 16 * lane < kBytes) copy_async16(to + i + 16 * lane, from + i);
        }
        commit_copies();
        from += kWarps * kBytes;
        if (++step == s.steps) step = 0, tile += gridDim.x, from += jump - kWarps * kBytes;
    };
#pragma unroll
    for (int i = 0; i < kRing; ++i) request(ring + i * kBytes);
    prologue.early();
    // The end: thread = row r of the tile of turn `turn_of`.
    const int turn_of = threadIdx.x / kTileRows, r = threadIdx.x % kTileRows;
    const int row = (blockIdx.x + turn_of * gridDim.x) * kTileRows + r;
    const bool adds = turn_of < s.turns && row < part.rows;
    float factor = 1;
    if constexpr (K != Kind::bf16)
        if (adds) factor = part.factor[row];
    wait_for_predecessor();
    typename std::decay_t<Finish>::Loaded loaded{};
    if (adds) loaded = finish.load(row, 0);
    prologue(h, 0);
    __syncthreads();
    prologue.late();

    uint8_t* piece = ring;
    float* to = sums + warp * kTileRows + (lane >> 2);
#pragma unroll 1
    for (int at = blockIdx.x; at < part.tiles; at += gridDim.x, to += kWarps * kTileRows) {
        float acc[4] = {};
        const bf16* x = h + warp * kPieceChunks<K> * kChunkCols;
#pragma unroll 1
        for (int i = 0; i < s.steps; ++i, x += kWarps * kPieceChunks<K> * kChunkCols) {
            wait_copies<kRing - 1>();
            if constexpr (K != Kind::bf16) __syncwarp();  // parts were copied by other lanes
            multiply_piece<K>(piece, x, lane, acc);
            if constexpr (OneShape<K, kAhead>::kRefill) {
                if constexpr (K != Kind::bf16) __syncwarp();
                request(piece);
                piece = piece == ring + (kRing - 1) * kBytes ? ring : piece + kBytes;
            } else {
                commit_copies();
                piece += kBytes;
            }
        }
        if ((lane & 3) == 0) {
            to[0] = acc[0];
            to[8] = acc[2];
        }
    }
    __syncthreads();
    if (adds)
        finish.store(row, 0, loaded,
                     add_parts(kWarps, sums + turn_of * kWarps * kTileRows + r, kTileRows) * factor);
}

}  // namespace quern::cuda
