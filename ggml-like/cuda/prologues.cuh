// How activations come into shared memory for few-row products: as they are, normalised, or normalised and gated.
// All loads of activations go past L1: the kernel may have started before they were written.
#pragma once

#include "ggml-like/cuda/few_rows.cuh"

namespace quern::cuda {

/// Columns that a chunk has beyond the matrix.
__device__ __forceinline__ void zero_padding(bf16* h, int stride, int rows, int columns) {
    const int padded = (columns + kChunkCols - 1) / kChunkCols * kChunkCols;
    const int pad = padded - columns;
    for (int i = threadIdx.x; i < rows * pad; i += blockDim.x)
        h[i / pad * stride + activation_place(columns + i % pad)] = __float2bfloat16(0.0f);
}

/// h = x, BF16.
template <Kind K>
struct PlainRows {
    const bf16* x;
    int64_t ld;
    int columns, rows;

    __device__ __forceinline__ void early() const {}
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        const int pieces = columns / 8;
        for (int i = threadIdx.x; i < rows * pieces; i += blockDim.x) {
            const int n = i / pieces, k = i % pieces * 8;
            const uint4 v = __ldcg(reinterpret_cast<const uint4*>(x + n * ld + k));
            store8(h + n * stride, k, v);
        }
        zero_padding(h, stride, rows, columns);
    }
    /// Eight columns from k on, k a multiple of 8, to their places.
    __device__ static __forceinline__ void store8(bf16* row, int k, const uint4& v) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&words[t]);
            if constexpr (K != Kind::bf16) pair = __hmul2(pair, __float2bfloat162_rn(kActivationLift<K>));
            *reinterpret_cast<__nv_bfloat162*>(row + activation_place(k + 2 * t)) = pair;
        }
    }
};

/// h = rms_norm(x, norm), x F32. The order of the sum of squares depends on the width only.
template <Kind K>
struct NormRows {
    const float* x;
    const float* norm;
    int columns, rows;
    float eps;
    float4 weight;  // of this thread: early()

    __device__ __forceinline__ void early() {
        const int k = threadIdx.x * 4;
        if (k < columns) weight = *reinterpret_cast<const float4*>(norm + k);
    }
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        __shared__ float partial[kFewRows][kWarps];
#pragma unroll 1
        for (int n = 0; n < rows; n += kTogether) batch(h, stride, n, partial);
        zero_padding(h, stride, rows, columns);
    }

  private:
    static constexpr int kTogether = 4;  // rows whose loads are under way at the same time

    __device__ __forceinline__ float4 at(int n, int k) const {
        return __ldcg(reinterpret_cast<const float4*>(x + static_cast<int64_t>(n) * columns + k));
    }
    __device__ __forceinline__ void batch(bf16* h, int stride, int n0, float (&partial)[kFewRows][kWarps]) const {
        const int first = threadIdx.x * 4;
        float4 kept[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            kept[i] = n0 + i < rows && first < columns ? at(n0 + i, first) : float4{};
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (n0 + i >= rows) break;
            float sum = square(kept[i]);
#pragma unroll 1
            for (int k = first + kThreads * 4; k < columns; k += kThreads * 4) sum += square(at(n0 + i, k));
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) partial[n0 + i][threadIdx.x / 32] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (n0 + i >= rows || first >= columns) break;
            float total = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) total += partial[n0 + i][w];
            const float r = rsqrtf(total / static_cast<float>(columns) + eps);
            bf16* row = h + (n0 + i) * stride;
            store4(row, first, kept[i], weight, r);
#pragma unroll 1
            for (int k = first + kThreads * 4; k < columns; k += kThreads * 4)
                store4(row, k, at(n0 + i, k), *reinterpret_cast<const float4*>(norm + k), r);
        }
    }
    __device__ static __forceinline__ float square(const float4& v) {
        return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    __device__ static __forceinline__ void store4(bf16* row, int k, const float4& v, const float4& w, float r) {
        // lifting by a power of two before or after the rounding gives the same bits
        constexpr float kLift = kActivationLift<K>;
        *reinterpret_cast<uint32_t*>(row + activation_place(k)) =
            pack_bf16(v.x * r * w.x * kLift, v.y * r * w.y * kLift);
        *reinterpret_cast<uint32_t*>(row + activation_place(k + 2)) =
            pack_bf16(v.z * r * w.z * kLift, v.w * r * w.w * kLift);
    }
};

/// h = (rms_norm(o, norm) * silu(z)) per head; a warp a head.
template <Kind K>
struct GatedRows {
    const bf16* o;  // [rows, heads, dim]
    const bf16* z;
    int64_t z_ld;  // between rows; heads are dim apart
    const float* norm;
    int heads, dim, rows;
    float eps;

    __device__ __forceinline__ void early() const {}
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        const int units = rows * heads;
        if (dim == 128)
            for (int i = threadIdx.x / 32; i < units; i += kTogether * kWarps) wide(h, stride, i, units);
        else
            for (int i = threadIdx.x / 32; i < units; i += kWarps) any(h, stride, i / heads, i % heads);
        zero_padding(h, stride, rows, heads * dim);
    }

  private:
    static constexpr int kTogether = 4;  // heads of a warp whose loads are under way at the same time

    /// Heads of 128, four columns a lane.
    __device__ __forceinline__ void wide(bf16* h, int stride, int first, int units) const {
        const int k = threadIdx.x % 32 * 4;
        const float4 w = *reinterpret_cast<const float4*>(norm + k);
        uint2 value[kTogether], gate[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int i = min(first + j * kWarps, units - 1), n = i / heads, head = i % heads;
            value[j] = __ldcg(reinterpret_cast<const uint2*>(o + static_cast<int64_t>(i) * 128 + k));
            gate[j] = __ldcg(reinterpret_cast<const uint2*>(z + n * z_ld + head * 128 + k));
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int i = first + j * kWarps;
            const float2 a = pair(value[j].x), b = pair(value[j].y), p = pair(gate[j].x), q = pair(gate[j].y);
            const float r = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) / 128.0f + eps);
            if (i >= units) continue;
            bf16* row = h + i / heads * stride;
            const int column = i % heads * 128 + k;
            put(row, column, a.x * r * w.x * silu(p.x), a.y * r * w.y * silu(p.y));
            put(row, column + 2, b.x * r * w.z * silu(q.x), b.y * r * w.w * silu(q.y));
        }
    }
    __device__ __forceinline__ void any(bf16* h, int stride, int n, int head) const {
        const int lane = threadIdx.x % 32;
        const bf16* from = o + (static_cast<int64_t>(n) * heads + head) * dim;
        const bf16* gate = z + n * z_ld + head * dim;
        float sum = 0;
        for (int k = 2 * lane; k < dim; k += 64) {
            const float2 v = load2(from + k);
            sum += v.x * v.x + v.y * v.y;
        }
        const float r = rsqrtf(warp_sum(sum) / static_cast<float>(dim) + eps);
        for (int k = 2 * lane; k < dim; k += 64) {
            const float2 v = load2(from + k), s = load2(gate + k);
            put(h + n * stride, head * dim + k, v.x * r * norm[k] * silu(s.x), v.y * r * norm[k + 1] * silu(s.y));
        }
    }
    __device__ static __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
    __device__ static __forceinline__ float2 pair(uint32_t v) {
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
    }
    __device__ static __forceinline__ void put(bf16* row, int column, float a, float b) {
        *reinterpret_cast<uint32_t*>(row + activation_place(column)) =
            pack_bf16(a * kActivationLift<K>, b * kActivationLift<K>);
    }
    __device__ static __forceinline__ float2 load2(const bf16* p) {
        const uint32_t v = __ldcg(reinterpret_cast<const uint32_t*>(p));
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
    }
};

}  // namespace quern::cuda
