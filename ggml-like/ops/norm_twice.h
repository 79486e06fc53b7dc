// norm_twice: two RMSNorms of chosen rows, one after the other
//
// x F32 [N, D], first, second F32 [D] (plain form), rows I32 [T] or none (all rows in order) -> y [T, D] in `activation`:
//   u = x[rows[t]] / sqrt(mean(x^2) + eps) * first;  y = u / sqrt(mean(u^2) + eps) * second
// FP32 (the CPU: sums in FP64), one rounding. mean(u^2) is computed as mean((x * first)^2) / (mean(x^2) + eps). A row
// outside [0, N) throws on the CPU; the GPU clamps it.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

struct NormTwiceParams {
    float eps;
};

/// inputs {x, first, second} and, with chosen rows, rows; outputs {y}.
extern const Op kNormTwice;

Tensor* norm_twice(Graph& g, std::string_view name, Tensor* x, Tensor* rows, Tensor* first, Tensor* second,
                   float eps, DType activation);

}  // namespace quern
