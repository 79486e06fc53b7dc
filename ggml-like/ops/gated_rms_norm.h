// gated_rms_norm: y = (x / sqrt(mean(x^2) + eps) * w) * silu(z), per head
//
// x [T, n, d], z [T, n, d] (strided view is fine), w F32 [d] (plain form) -> y [T, n*d] in x's dtype.
// FP32 throughout, one rounding. Source: HF transformers Qwen3_5Moe (norm before gate).
#pragma once

#include "ggml-like/graph.h"

namespace quern {

struct GatedRmsNormParams {
    float eps;
};

extern const Op kGatedRmsNorm;

Tensor* gated_rms_norm(Graph& g, std::string_view name, Tensor* x, Tensor* z, Tensor* w, float eps);

}  // namespace quern
