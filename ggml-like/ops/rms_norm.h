// rms_norm: y = x / sqrt(mean(x^2) + eps) * w
//
// x [T, D], w F32 [D] (checkpoints that store w - 1 are converted at load) -> y [T, D] in x's dtype.
// All in FP32, one rounding at the end. The sum runs over D in fixed order. Source: Zhang & Sennrich 2019.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

struct RmsNormParams {
    float eps;
};

extern const Op kRmsNorm;

Tensor* rms_norm(Graph& g, std::string_view name, Tensor* x, Tensor* w, float eps);

}  // namespace quern
