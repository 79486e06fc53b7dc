// The two sides of left_norm.h inside kernels.
#pragma once

#include "ggml-like/cuda/left_norm.h"

namespace quern::cuda {

/// By 16 neighbouring lanes for the 16 columns of a tile of row n, all there: x * norm[column], written to h,
/// and the tile's squares.
__device__ __forceinline__ bf16 leave_column(const NormWork& w, int n, int column, float x, float norm) {
    const bf16 h = __float2bfloat16(x * norm);
    w.h[n * w.columns + column] = h;
    float square = x * x;
#pragma unroll
    for (int d = 8; d > 0; d /= 2) square += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), square, d);
    if (column % 16 == 0) w.sums->squares[w.first + n][column / 16] = square;
    return h;
}

/// One warp: the factor of row n in two steps, a load and what can wait for it.
__device__ __forceinline__ float load_squares(const LeftNorm& left, int n) {
    float sum = 0;
    for (int i = threadIdx.x % 32; i < left.tiles; i += 32) sum += __ldcg(&left.sums->squares[n][i]);
    return sum;
}
__device__ __forceinline__ float norm_factor(const LeftNorm& left, float loaded) {
    return rsqrtf(warp_sum(loaded) * left.per_column + left.eps);
}

}  // namespace quern::cuda
