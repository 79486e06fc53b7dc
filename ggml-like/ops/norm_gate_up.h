// norm_gate_up: y = silu(gate norm(x)) * (up norm(x)), the first half of a dense MLP; the norm is split (residual.h)
//
// h [T, K] and squares (residual.h), W [2F, K] of segments {gate [F, K], up [F, K]} in any format of weight.h ->
// y [T, F] in h's dtype. Both products as in norm_linear, with its factor; silu and the product of the two in FP32;
// one rounding.
// Source: Shazeer 2020 (SwiGLU); HF transformers Qwen3_5MLP.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct NormGateUpParams {
    const Weight* weight;
    float eps;
    StepKind kind;
};

/// inputs {h, squares}; outputs {y}.
extern const Op kNormGateUp;

Tensor* norm_gate_up(Graph& g, std::string_view name, const Residual& in, const Weight& w, float eps,
                     StepKind kind);

}  // namespace quern
