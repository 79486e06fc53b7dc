// The split norm (ops/residual.h) as kernels see it: who makes x also writes h = x * w, rounded to BF16, and squares;
// who reads h multiplies its sums with the row's factor 1 / rms.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/op.h"

namespace quern::cuda::linear {

using namespace ptx;

inline constexpr int kSquareColumns = 16;  // of one number of squares, in answer steps

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
    int numbers = 0;
    float per_column = 0, eps = 0;

    RowScale from_row(int row) const {
        RowScale s = *this;
        s.squares += static_cast<int64_t>(row) * numbers;
        return s;
    }
};
RowScale scale_of(const Tensor& h, const Tensor& squares, float eps);

/// Prompts: h and squares [rows, 1] of x F32 [rows, columns].
void defer_rows(Context& context, const float* x, const Defer& defer, int rows);

}  // namespace quern::cuda::linear
