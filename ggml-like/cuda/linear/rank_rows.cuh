// The end of a prompt's product of which each rank has a part, rounded to BF16: x' = residual + their sum in the order of the ranks,
// FP32, h and squares of x' (epilogue.cuh). A rank ends the rows that it adds up and those that others did (comm/chunks.cuh), in the same way.
#pragma once

#include "ggml-like/cuda/comm/chunks.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"

namespace quern::cuda::linear {

inline constexpr int kRankRowThreads = comm::kLargeThreads;

/// All of an End of comm/chunks.cuh but part(). kWhole: every rank gets x' of all rows; else x' of rows that another rank adds up
/// is left as it is. The arithmetic is spelled out: a row's bits do not depend on where it is in which kernel.
template <bool kWholeRows>
struct RankRows {
    static constexpr bool kWhole = kWholeRows;
    static constexpr int kPartsAtOnce = 8, kRowsAtOnce = 4;
    using Part = uint2;
    using Before = float4;

    const float* residual;
    float* x;
    Defer defer;

    __device__ __forceinline__ int64_t at(int64_t row, int column) const {
        return row * defer.columns + column;
    }
    __device__ static __forceinline__ uint2 round(const float4& v) {
        return make_uint2(ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w));
    }
    __device__ __forceinline__ float4 before(int64_t row, int column) const {
        return __ldcg(reinterpret_cast<const float4*>(residual + at(row, column)));
    }
    __device__ __forceinline__ float4 become(const float4& a, const float4& sum) const {
        return make_float4(add_residual(a.x, sum.x), add_residual(a.y, sum.y), add_residual(a.z, sum.z),
                           add_residual(a.w, sum.w));
    }
    __device__ __forceinline__ void keep(int64_t row, int column, const float4& v, float& squares) const {
        *reinterpret_cast<float4*>(x + at(row, column)) = v;
        squares = __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, squares))));
        keep_short(row, column, shorten(column, v));
    }
    /// h.
    __device__ __forceinline__ uint2 shorten(int column, const float4& v) const {
        const float4 norm = __ldg(reinterpret_cast<const float4*>(defer.norm + column));
        return round(make_float4(v.x * norm.x, v.y * norm.y, v.z * norm.z, v.w * norm.w));
    }
    __device__ __forceinline__ void keep_short(int64_t row, int column, const uint2& h) const {
        *reinterpret_cast<uint2*>(defer.h + at(row, column)) = h;
    }
    __device__ __forceinline__ void keep_number(int64_t row, float squares) const {
        defer.squares[row] = squares;
    }
    template <int kRows>
    __device__ __forceinline__ void note(int i, int rows, const float (&squares)[kRows]) const {
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
            const float sum = ptx::warp_sum(squares[k]);
            if (k < rows && threadIdx.x % 32 == 0) partial()[i + k][threadIdx.x / 32] = sum;
        }
    }
    /// The rows' squares, as write_squares makes them.
    template <typename Send>
    __device__ __forceinline__ void end_chunk(int64_t n, int rows, const Send& send) const {
        __syncthreads();
        const int i = static_cast<int>(threadIdx.x);
        if (i < rows) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) total += partial()[i][w];
            keep_number(n + i, total);
            if constexpr (!kWhole) send(i, total);
        }
        __syncthreads();
    }

  private:
    static constexpr int kWarps = kRankRowThreads / 32;
    using Partial = float (*)[kWarps];

    __device__ static __forceinline__ Partial partial() {
        __shared__ float memory[comm::kChunkRows][kWarps];
        return memory;
    }
};

/// How messages of rows are cut. Throws Error(device) where a row is wider than a chunk.
template <bool kWhole>
comm::Cut cut_rows(const Context& c, int columns, int64_t count) {
    constexpr int kBytes = kWhole ? 4 : 2;
    const int ranks = c.peers->ranks;
    if (int64_t{columns} * kBytes > comm::row_bytes(ranks)) unsupported("sums over ranks", "rows so wide");
    return {ranks, columns, count, kBytes, c.sms};
}

}  // namespace quern::cuda::linear
