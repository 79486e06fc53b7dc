// layer_norm: y = (x - mean) / sqrt(variance + eps) * weight + bias, of each row
//
// x F32 [N, D], weight, bias F32 [D] -> y [N, D] in `activation`. FP32, the variance of the differences from the mean
// (divided by D); one rounding. Source: Ba et al. 2016.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

struct LayerNormParams {
    float eps;
};

/// inputs {x, weight, bias}; outputs {y}.
extern const Op kLayerNorm;

Tensor* layer_norm(Graph& g, std::string_view name, Tensor* x, Tensor* weight, Tensor* bias, float eps,
                   DType activation);

}  // namespace quern
