// norm_gate_up: y = silu(gate h) * (up h),  h = rms_norm(x, norm): the first half of a dense MLP
//
// x F32 [T, K], norm F32 [K] (1 added at load where checkpoints store w - 1), W [2F, K] of segments {gate [F,
// K], up [F, K]} in any format of weight.h -> y [T, F] in `activation`.
//   h as in norm_linear, rounded once to `activation` (F32 or BF16); both products are FP32 sums as in
//   linear_add; silu and the product of the two in FP32; one rounding. Same bits for a row alone or in a
//   batch as in linear_add.
// Source: Shazeer 2020 (SwiGLU); HF transformers Qwen3_5MLP.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct NormGateUpParams {
    const Weight* weight;
    float eps;
};

/// inputs {x, norm}; outputs {y, h}: h [T, K] in `activation` is work space, its contents undefined
/// afterwards.
extern const Op kNormGateUp;

Tensor* norm_gate_up(Graph& g, std::string_view name, Tensor* x, Tensor* norm, const Weight& w, float eps,
                     DType activation);

}  // namespace quern
