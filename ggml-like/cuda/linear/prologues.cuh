// How activations come into shared memory for few-row products: as they are, with or without the factors of their norm.
// All loads of activations go past L1: the kernel may have started before they were written.
#pragma once

#include "ggml-like/cuda/linear/deferred.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// Columns that a chunk has beyond the matrix.
template <Kind K>
__device__ __forceinline__ void zero_padding(bf16* h, int stride, int rows, int columns) {
    const int padded = (columns + kChunkCols - 1) / kChunkCols * kChunkCols;
    const int pad = padded - columns;
#pragma unroll 1
    for (int n = 0; n < rows && pad > 0; ++n)
        for (int i = threadIdx.x; i < pad; i += blockDim.x)
            h[n * stride + activation_place<K>(columns + i)] = __float2bfloat16(0.0f);
}

/// h = x, BF16. kTogether: loads of a thread that are under way at the same time.
template <Kind K, int kTogether = 8>
struct PlainRows {
    const bf16* x;
    int64_t ld;
    int columns, rows;

    __device__ __forceinline__ void early() const {}
    __device__ __forceinline__ void late() const {}
    /// A row is loaded by 2^n threads: as many as it has eights of columns, if the block has them.
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        const int log_threads = min(31 - __clz(blockDim.x), 32 - __clz(columns / 8 - 1));
        const int own = threadIdx.x >> log_threads, step = blockDim.x >> log_threads;
#pragma unroll 1
        for (int k = (threadIdx.x & ((1 << log_threads) - 1)) * 8; k < columns; k += 8 << log_threads)
#pragma unroll 1
            for (int n0 = own; n0 < rows; n0 += kTogether * step) {
                uint4 v[kTogether];
#pragma unroll
                for (int j = 0; j < kTogether; ++j)
                    if (n0 + j * step < rows)
                        v[j] = __ldcg(reinterpret_cast<const uint4*>(x + (n0 + j * step) * ld + k));
#pragma unroll
                for (int j = 0; j < kTogether; ++j)
                    if (n0 + j * step < rows) store8(h + (n0 + j * step) * stride, k, v[j]);
            }
        zero_padding<K>(h, stride, rows, columns);
    }

  private:
    /// Eight columns from k on, k a multiple of 8, to their places.
    __device__ static __forceinline__ void store8(bf16* row, int k, const uint4& v) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&words[t]);
            if constexpr (K != Kind::bf16) pair = __hmul2(pair, __float2bfloat162_rn(kActivationLift<K>));
            *reinterpret_cast<__nv_bfloat162*>(row + activation_place<K>(k + 2 * t)) = pair;
        }
    }
};

/// Rows whose norm is deferred, as they are, and their factors in shared memory; up to 8 rows.
template <Kind K, int kTogether>
struct ScaledRows {
    PlainRows<K, kTogether> rows;
    RowScale scale;
    float* factor;      // [8]
    float squares = 0;  // of row `warp`

    __device__ __forceinline__ void early() const {}
    __device__ __forceinline__ void operator()(bf16* h, int stride) {
        const int warp = threadIdx.x / 32;
        if (warp < rows.rows) squares = load_squares(scale, warp);
        rows(h, stride);
    }
    __device__ __forceinline__ void late() const {
        const int warp = threadIdx.x / 32;
        if (warp >= rows.rows) return;
        const float own = norm_factor(scale, squares);
        if (threadIdx.x % 32 == 0) factor[warp] = own;
    }
};

}  // namespace quern::cuda::linear
