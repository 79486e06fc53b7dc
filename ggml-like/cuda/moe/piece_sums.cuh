// Sums over one piece of a tile by one warp. The order of a sum is fixed, so its bits depend neither on how a tile is
// cut into pieces nor on who adds them:
//
//   answers   chunks of a split in one sum, then splits in order (ColumnSplits, fp4_rows.cuh)
//   prompts   all chunks in one chain of products with scaled weights, as gemm.h has them
#pragma once

#include "ggml-like/cuda/moe/tile_runs.cuh"
#include "ggml-like/cuda/pack/weight_chunk.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// total += splits [first, last) of a tile, whose chunks begin at `chunk`. x: the lane's row, plus 16 t bytes.
template <bool kHalf>
__device__ __forceinline__ void add_splits_of(const ColumnSplits& splits, int first, int last,
                                              const uint8_t* chunk, const uint8_t* x, int lane,
                                              float (&total)[4]) {
    x += splits.begin(first) * 128;
    for (int q = first; q < last; ++q) {
        float sum[4] = {};
        for (int c = splits.begin(q); c < splits.end(q); ++c, chunk += kFp4Chunk, x += 128)
            multiply_fp4<kHalf>(chunk, x, lane, sum);
#pragma unroll
        for (int i = 0; i < 4; i += kHalf ? 2 : 1) total[i] += sum[i];
    }
}

/// total += a whole piece of a tile, of splits of kEach chunks. x: the lane's row at the piece, plus 16 t bytes.
template <int kEach, bool kHalf>
__device__ __forceinline__ void add_whole_piece(const uint8_t* chunk, const uint8_t* x, int lane,
                                                float (&total)[4]) {
#pragma unroll(kEach == 1 ? 2 : 1)
    for (int split = 0; split < kPieceChunks / kEach; ++split, chunk += kEach * kFp4Chunk, x += kEach * 128) {
        float sum[4] = {};
#pragma unroll
        for (int c = 0; c < kEach; ++c) multiply_fp4<kHalf>(chunk + c * kFp4Chunk, x + c * 128, lane, sum);
#pragma unroll
        for (int i = 0; i < 4; i += kHalf ? 2 : 1) total[i] += sum[i];
    }
}

/// total += `chunks` chunks from `chunk` on, as prompts add.
__device__ __forceinline__ void add_chunks_in_chain(const uint8_t* chunk, const uint8_t* x, int chunks,
                                                    int lane, float (&total)[4]) {
#pragma unroll 4
    for (int c = 0; c < chunks; ++c, chunk += kFp4Chunk, x += 128) {
        WeightChunk<Kind::nvfp4> weights;
        weights.load(chunk, lane);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint4 v = *reinterpret_cast<const uint4*>(x + 64 * j);
            uint32_t a[4];
            weights.fragment(2 * j, a);
            mma(total, a, v.x, v.y);
            weights.fragment(2 * j + 1, a);
            mma(total, a, v.z, v.w);
        }
    }
}
/// total += piece `piece` of a tile, as prompts add.
template <int kEach>
__device__ __forceinline__ void add_piece_in_chain(const Stream& s, const ColumnSplits& splits, int piece,
                                                   const uint8_t* chunk, const uint8_t* x, int lane,
                                                   float (&total)[4]) {
    if constexpr (kEach == 0) {
        const int first = piece * s.piece_splits, last = min(first + s.piece_splits, splits.count) - 1;
        const int begin = splits.begin(first);
        add_chunks_in_chain(chunk, x + begin * 128, splits.end(last) - begin, lane, total);
    } else {
        add_chunks_in_chain(chunk, x + piece * kPieceChunks * 128, kPieceChunks, lane, total);
    }
}

/// total += piece `piece` of a tile, as answers add.
template <int kEach, bool kHalf>
__device__ __forceinline__ void add_piece(const Stream& s, const ColumnSplits& splits, int piece,
                                          const uint8_t* chunk, const uint8_t* x, int lane,
                                          float (&total)[4]) {
    if constexpr (kEach == 0) {
        const int first = piece * s.piece_splits;
        add_splits_of<kHalf>(splits, first, min(first + s.piece_splits, splits.count), chunk, x, lane, total);
    } else {
        add_whole_piece<kEach, kHalf>(chunk, x + piece * kPieceChunks * 128, lane, total);
    }
}

}  // namespace quern::cuda::moe
