// The matrix product behind the linear ops on the CPU.
#pragma once

#include "ggml-like/cpu/context.h"
#include "ggml-like/weight.h"

namespace quern::cpu {

/// y[t * ldy + n] = (x W^T)[t][n] as plain floats, unrounded. The order of a sum depends on the width only,
/// so a row has the same bits alone or in a batch. Uses context buffers 0 and 1.
void linear_rows(const Tensor& x, const Weight& w, float* y, int64_t ldy, Context& context);

/// y = x W^T (+ residual, if not null), rounded once to y's dtype. Uses context buffers 0, 1 and 2.
void linear(const Tensor& x, const Weight& w, const Tensor* residual, const Tensor& y, Context& context);

}  // namespace quern::cpu
