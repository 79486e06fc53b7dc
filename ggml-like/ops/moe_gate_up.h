// moe_gate_up: silu(gate x) * (up x) of every chosen expert, and of the shared expert
//
// x [T, D], ids I32 [T, K], experts: E weights [2F, D] of segments {gate [F, D], up [F, D]}, shared: one such
// weight with its own width Fs -> routed [T, K, F], shared [T, Fs] in x's dtype. Both products are FP32 sums
// as in `linear`; silu and the product in FP32; one rounding.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct MoeGateUpParams {
    const ExpertWeights* experts;
    const Weight* shared;
};

struct MoeGateUpResult {
    Tensor* routed;
    Tensor* shared;
};

extern const Op kMoeGateUp;

MoeGateUpResult moe_gate_up(Graph& g, std::string_view name, Tensor* x, Tensor* ids,
                            const ExpertWeights& experts, const Weight& shared);

}  // namespace quern
