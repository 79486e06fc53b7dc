// gated_norm_linear_add: y = residual + h W^T,  h = (o / sqrt(mean(o^2) + eps) * norm) * silu(z) per head
//
// o [T, n, d], z [T, n, d] (strided view is fine), norm F32 [d] (plain form), residual F32 [T, N], W [N, n*d] ->
// y F32 [T, N]. h in FP32, rounded once to o's dtype; the product as in linear_add.
// Source: HF transformers Qwen3_5Moe (norm before gate).
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct GatedNormLinearAddParams {
    const Weight* weight;
    float eps;
};

/// inputs {o, z, norm, residual}; outputs {y, h}: h [T, n*d] in o's dtype is work space.
extern const Op kGatedNormLinearAdd;

Tensor* gated_norm_linear_add(Graph& g, std::string_view name, Tensor* o, Tensor* z, Tensor* norm, float eps,
                              const Weight& w, Tensor* residual);

}  // namespace quern
