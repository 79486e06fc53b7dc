// The norms inside fused ops on the CPU. FP32, one rounding at the store.
#pragma once

#include "ggml-like/cpu/context.h"
#include "ggml-like/tensor.h"

namespace quern::cpu {

/// One row of the residual stream (ops/residual.h): h = x * w and the sum of squares, all in the first number.
void defer_norm(const float* x, const Tensor& w, const Tensor& h, const Tensor& squares, int64_t row);
/// The same for all rows of x [T, D].
void defer_norm(const Tensor& x, const Tensor& w, const Tensor& h, const Tensor& squares, Context& context);
/// 1 / rms of a row of `columns` columns, from its squares.
float norm_factor(const Tensor& squares, int64_t row, int64_t columns, float eps);
/// y [T, n*d] = (x / sqrt(mean(x^2) + eps) * w) * silu(z), heads of x and z [T, n, d]
void gated_rms_norm(const Tensor& x, const Tensor& z, const Tensor& w, float eps, const Tensor& y,
                    Context& context);

}  // namespace quern::cpu
