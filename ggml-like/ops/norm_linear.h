// norm_linear: y = norm(x) W^T, the norm split as in residual.h: (h W^T) / rms(x)
//
// h [T, K] and squares (residual.h), W [N, K] in any format of weight.h -> y [T, N] = (h W^T) / sqrt(sum of squares / K
// + eps), in `dtype`. The product is summed as in linear_add, then multiplied by the factor in FP32; one rounding.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct NormLinearParams {
    const Weight* weight;
    float eps;
    StepKind kind;
};

/// inputs {h, squares}; outputs {y}.
extern const Op kNormLinear;

Tensor* norm_linear(Graph& g, std::string_view name, const Residual& in, const Weight& w, float eps,
                    StepKind kind, DType dtype);

}  // namespace quern
