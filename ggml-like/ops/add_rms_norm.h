// add_rms_norm: sum = x + delta;  y = rms_norm(sum, w)
//
// x [T, D], delta [T, D], w F32 [D] -> sum [T, D] in x's dtype, y [T, D] in delta's dtype. The sum is rounded
// to its dtype before the norm reads it; the norm is FP32 with one rounding. sum may not alias x (the planner
// shares memory).
#pragma once

#include "ggml-like/graph.h"

namespace quern {

struct AddRmsNormParams {
    float eps;
};

struct AddRmsNormResult {
    Tensor* sum;
    Tensor* y;
};

extern const Op kAddRmsNorm;

AddRmsNormResult add_rms_norm(Graph& g, std::string_view name, Tensor* x, Tensor* delta, Tensor* w,
                              float eps);

}  // namespace quern
