// How activations come into shared memory for few-row products: as they are, or normalised.
// All loads of activations go past L1: the kernel may have started before they were written.
#pragma once

#include "ggml-like/cuda/few_rows.cuh"

namespace quern::cuda {

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

/// h = rms_norm(x, norm), x F32. The order of the sum of squares depends on the width only. kTogether, 1 or
/// 4: rows whose loads are under way at the same time.
template <Kind K, int kTogether>
struct NormRows {
    const float* x;
    const float* norm;
    int columns, rows;
    float eps;
    float per_column;  // 1 / columns
    float4 weight;     // of this thread: early()

    __device__ __forceinline__ void early() {
        const int k = threadIdx.x * 4;
        if (k < columns) weight = *reinterpret_cast<const float4*>(norm + k);
    }
    __device__ __forceinline__ void late() const {}
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        __shared__ __align__(16) float partial[kFewRows][kWarps];
#pragma unroll 1
        for (int n = 0; n < rows; n += kTogether) batch(h, stride, n, partial + n);
        zero_padding<K>(h, stride, rows, columns);
    }

  private:
    static_assert(kTogether == 1 || kTogether == 4);

    __device__ __forceinline__ float4 at(int n, int k) const {
        return __ldcg(reinterpret_cast<const float4*>(x + static_cast<int64_t>(n) * columns + k));
    }
    /// Rows n0 .. n0 + kTogether - 1; absent ones count as zeros.
    __device__ __forceinline__ void batch(bf16* h, int stride, int n0, float (*partial)[kWarps]) const {
        const int first = threadIdx.x * 4;
        float4 kept[kTogether];
        float sum[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            kept[i] = n0 + i < rows && first < columns ? at(n0 + i, first) : float4{};
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            sum[i] = square(kept[i]);
#pragma unroll 1
            for (int k = first + kThreads * 4; k < columns && n0 + i < rows; k += kThreads * 4)
                sum[i] += square(at(n0 + i, k));
        }
        share_sums(sum, partial);
        __syncthreads();
        if (first >= columns) return;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < kWarps; w += 4) {
                const float4 four = *reinterpret_cast<const float4*>(&partial[i][w]);
                total += (four.x + four.y) + (four.z + four.w);
            }
            const float r = rsqrtf(total * per_column + eps);
            bf16* row = h + (n0 + i) * stride;
            if (n0 + i < rows) store4(row, first, kept[i], weight, r);
#pragma unroll 1
            for (int k = first + kThreads * 4; k < columns && n0 + i < rows; k += kThreads * 4)
                store4(row, k, at(n0 + i, k), *reinterpret_cast<const float4*>(norm + k), r);
        }
    }
    /// The warp's sums of each row to partial[row][warp].
    __device__ static __forceinline__ void share_sums(float (&sum)[kTogether], float (*partial)[kWarps]) {
        constexpr int kLanes = 32 / kTogether;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const float all = lane_sums<32>(sum);
        if (lane % kLanes == 0) partial[lane / kLanes][warp] = all;
    }
    __device__ static __forceinline__ float square(const float4& v) {
        return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    __device__ static __forceinline__ void store4(bf16* row, int k, const float4& v, const float4& w,
                                                  float r) {
        // lifting by a power of two before or after the rounding gives the same bits
        constexpr float kLift = kActivationLift<K>;
        *reinterpret_cast<uint32_t*>(row + activation_place<K>(k)) =
            pack_bf16(v.x * r * w.x * kLift, v.y * r * w.y * kLift);
        *reinterpret_cast<uint32_t*>(row + activation_place<K>(k + 2)) =
            pack_bf16(v.z * r * w.z * kLift, v.w * r * w.w * kLift);
    }
};

}  // namespace quern::cuda
