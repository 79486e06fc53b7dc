// moe_gate_up: silu(gate h) * (up h) of every chosen expert, and of the shared expert
//
// h [T, D], ids I32 [T, K], groups (moe_route.h), experts: E weights [2F, D] of segments {gate [F, D], up [F,
// D]}, shared: one such weight with its own width Fs -> routed [T, K, F], shared [T, Fs] in h's dtype. Both
// products are FP32 sums as in linear_add; silu and the product in FP32; one rounding.
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

/// inputs {h, ids, groups}; outputs {routed, shared}.
extern const Op kMoeGateUp;

MoeGateUpResult moe_gate_up(Graph& g, std::string_view name, Tensor* h, Tensor* ids, Tensor* groups,
                            const ExpertWeights& experts, const Weight& shared);

}  // namespace quern
