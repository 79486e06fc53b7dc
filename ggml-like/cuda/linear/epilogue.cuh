// What becomes of sums: the activation between gate and up, the residual, and the two sides of the split norm
// (ops/residual.h): who makes x also writes h = x * w, rounded to BF16, and squares; who reads h multiplies its sums with
// the row's factor 1 / rms. The arithmetic of answers is spelled out, so that a compiler fuses no product and sum in one
// kernel only.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/op.h"

namespace quern::cuda::linear {

using namespace ptx;

// ---- activation and residual ----

/// silu(gate) * up. Answers: rounded to BF16.
__device__ __forceinline__ bf16 gated(float gate, float up) {
    return __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
}
/// Prompts. Approximations that take subnormal numbers as zero; where that happens the result is 0, or does not change.
__device__ __forceinline__ float gated_prompt(float gate, float up) {
    float e, over;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(gate, -1.44269504f)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(over) : "f"(1.0f + e));
    return __fmul_rn(__fmul_rn(gate, over), up);
}

/// x' = residual + sum.
__device__ __forceinline__ float add_residual(float residual, float sum) { return __fadd_rn(residual, sum); }
/// A sum times the factor of its weights' row, then times that of its norm.
__device__ __forceinline__ float scaled(float sum, float factor) { return __fmul_rn(sum, factor); }

// ---- the split norm ----

/// Columns of one number of squares: in answer steps; in prompt steps, unless they have one number a row.
inline constexpr int kSquareColumns = 16, kPromptSquareColumns = 8;

/// The part of who makes x.
struct Defer {
    const float* norm;  // [columns]
    bf16* h;            // [rows, columns]
    float* squares;     // [rows, numbers]
    int columns, numbers;

    Defer from_row(int row) const {
        Defer d = *this;
        d.h += static_cast<int64_t>(row) * columns;
        d.squares += static_cast<int64_t>(row) * numbers;
        return d;
    }
};
/// Of a node's outputs h and squares.
Defer defer_of(const Tensor& norm, const Tensor& h, const Tensor& squares);

/// The part of who reads h: rows' factors.
struct RowScale {
    const float* squares = nullptr;  // null: factor 1
    int numbers = 0;                 // of a row; 0: `squares` are the factors themselves, of prompts
    float per_column = 0, eps = 0;
};
RowScale scale_of(const Tensor& h, const Tensor& squares, float eps);
inline RowScale scale_of_factors(const float* factors) { return {.squares = factors}; }

/// Prompts: h and squares [rows, 1] of x F32 [rows, columns].
void defer_rows(Context& context, const float* x, const Defer& defer, int rows);

/// Whole block of kThreads, a row of a prompt: the row's squares from its threads' sums.
template <int kThreads>
__device__ __forceinline__ void write_squares(const Defer& d, int64_t n, float own) {
    __shared__ float partial[kThreads / 32];
    own = warp_sum(own);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) total += partial[w];
    d.squares[n] = total;
}

/// Answers: by 16 neighbouring lanes for 16 neighbouring columns of row n, all there: h, and their squares.
__device__ __forceinline__ bf16 defer_column(const Defer& d, int n, int column, float x, float norm) {
    const bf16 h = __float2bfloat16(x * norm);
    d.h[static_cast<int64_t>(n) * d.columns + column] = h;
    float square = x * x;
#pragma unroll
    for (int i = 8; i > 0; i /= 2) square += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), square, i);
    if (column % kSquareColumns == 0) d.squares[n * d.numbers + column / kSquareColumns] = square;
    return h;
}
/// The same by four neighbouring lanes, four columns each, from `column` on: x, and the norm's weights.
__device__ __forceinline__ void defer_four(const Defer& d, int n, int column, const float4& x,
                                           const float4& norm) {
    *reinterpret_cast<uint2*>(d.h + static_cast<int64_t>(n) * d.columns + column) =
        make_uint2(pack_bf16(x.x * norm.x, x.y * norm.y), pack_bf16(x.z * norm.z, x.w * norm.w));
    // The sums of defer_column: columns 8 apart, then 4, 2 and 1.
    float square[4] = {x.x * x.x, x.y * x.y, x.z * x.z, x.w * x.w};
    const unsigned mask = 0xfu << (threadIdx.x & 28);
#pragma unroll
    for (int lane = 2; lane > 0; lane /= 2)
#pragma unroll
        for (float& s : square) s += __shfl_xor_sync(mask, s, lane);
    const float sum = (square[0] + square[2]) + (square[1] + square[3]);
    if (column % kSquareColumns == 0) d.squares[n * d.numbers + column / kSquareColumns] = sum;
}

/// Prompts: eight neighbouring columns of row n, from `column` on: h, and their squares. low, high: the norm's weights.
__device__ __forceinline__ void defer_eight(const Defer& d, int64_t n, int column, const float (&x)[8],
                                            const float4& low, const float4& high) {
    *reinterpret_cast<uint4*>(d.h + n * d.columns + column) =
        make_uint4(pack_bf16(x[0] * low.x, x[1] * low.y), pack_bf16(x[2] * low.z, x[3] * low.w),
                   pack_bf16(x[4] * high.x, x[5] * high.y), pack_bf16(x[6] * high.z, x[7] * high.w));
    float square = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) square = __fmaf_rn(x[i], x[i], square);
    d.squares[n * d.numbers + column / kPromptSquareColumns] = square;
}

/// One warp: the squares of a row in two steps, loads and what waits for them. A lane adds up every 32nd number, in order; kHeld of them,
/// a multiple of 4, are under way between the steps.
template <int kHeld>
struct SquaresOfRow {
    static constexpr int kTogether = 4;
    float square[kHeld] = {};

    __device__ __forceinline__ void load(const RowScale& s, int n) {
#pragma unroll
        for (int first = 0; first < kHeld; first += kTogether) {
            if (first * 32 >= s.numbers) break;
            load_four(s, n, first, square + first);
        }
    }
    __device__ __forceinline__ float sum(const RowScale& s, int n) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) sum += square[i];
#pragma unroll 1
        for (int first = kHeld; first * 32 < s.numbers; first += kTogether) {
            float more[kTogether];
            load_four(s, n, first, more);
#pragma unroll
            for (const float v : more) sum += v;
        }
        return sum;
    }

  private:
    __device__ __forceinline__ static void load_four(const RowScale& s, int n, int first, float* to) {
        const int lane = threadIdx.x % 32;
        const float* from = s.squares + n * s.numbers + lane + 32 * first;
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            to[i] = lane + 32 * (first + i) < s.numbers ? __ldcg(from + 32 * i) : 0.0f;
    }
};
/// One warp: both steps at once.
__device__ __forceinline__ float load_squares(const RowScale& s, int n) {
    SquaresOfRow<4> squares;
    squares.load(s, n);
    return squares.sum(s, n);
}
__device__ __forceinline__ float norm_factor(const RowScale& s, float loaded) {
    return rsqrtf(warp_sum(loaded) * s.per_column + s.eps);
}
/// `warps` whole warps: factors[n] of row first + n * step, of up to 64 rows.
__device__ __forceinline__ void norm_factors(const RowScale& s, int first, int step, int rows, int warps,
                                             float* factors) {
    constexpr int kTogether = 4;  // rows whose loads are under way at the same time
    for (int base = threadIdx.x / 32; base < rows; base += kTogether * warps) {
        float loaded[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            loaded[i] = load_squares(s, first + min(base + i * warps, rows - 1) * step);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const float factor = norm_factor(s, loaded[i]);
            if (threadIdx.x % 32 == 0 && base + i * warps < rows) factors[base + i * warps] = factor;
        }
    }
}
/// One thread, prompts: squares are one number, or the factor.
__device__ __forceinline__ float prompt_factor_of(const RowScale& s, float squares) {
    return s.numbers == 0 ? squares : rsqrtf(squares * s.per_column + s.eps);
}
__device__ __forceinline__ float prompt_factor(const RowScale& s, int64_t n) {
    return prompt_factor_of(s, __ldcg(s.squares + n));
}

}  // namespace quern::cuda::linear
