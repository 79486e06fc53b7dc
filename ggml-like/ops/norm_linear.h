// norm_linear: y = rms_norm(x, norm) W^T
//
// x F32 [T, K], norm F32 [K] (1 added at load where checkpoints store w - 1), W [N, K] in any format of
// weight.h -> y [T, N] in `dtype`.
//   h = x / sqrt(mean(x^2) + eps) * norm, FP32, rounded once to `activation` (F32 or BF16);  y = h W^T as in
//   linear_add. On a GPU, up to 8 rows after a moe_down: h is rounded without the factor 1 / sqrt(...), which
//   meets the sums instead (cuda/left_norm.h)
// Source of the norm: Zhang & Sennrich 2019.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct NormLinearParams {
    const Weight* weight;
    float eps;
};

/// inputs {x, norm}; outputs {y, h}: h [T, K] in `activation` is work space, its contents undefined
/// afterwards.
extern const Op kNormLinear;

Tensor* norm_linear(Graph& g, std::string_view name, Tensor* x, Tensor* norm, const Weight& w, float eps,
                    DType activation, DType dtype);

}  // namespace quern
