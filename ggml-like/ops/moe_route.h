// moe_route: norm, then K experts a row and the shared expert's gate
//
// x F32 [T, D], norm F32 [D], router [E + 1, D]: segments {gate [E, D], shared_expert_gate [1, D]} ->
//   h [T, D] in `activation` = x / sqrt(mean(x^2) + eps) * norm, FP32, one rounding
//   ids I32 [T, K] in falling order of probability, ties to the lower id
//   weights F32 [T, K] = softmax over all E logits, the chosen ones renormalised to sum 1
//   shared F32 [T] = sigmoid(shared_expert_gate . h)
//   groups I32 [E + 1 + T*K]: E + 1 offsets, then the pairs (t*K + j) of each expert, rising: expert e owns
//     pairs[offset[e]] .. pairs[offset[e+1] - 1]
// Logits (of the rounded h) and softmax in FP32. A NaN logit never wins; if fewer than K are finite the CPU
// throws, the GPU takes the lowest ids that are left with weight NaN.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct MoeRouteParams {
    const Weight* router;
    int used;  // K
    float eps;
};

struct MoeRouteResult {
    Tensor* h;
    Tensor* ids;
    Tensor* weights;
    Tensor* shared;
    Tensor* groups;
};

/// inputs {x, norm}; outputs {h, ids, weights, shared, groups, logits}: logits F32 [T, E + 1 rounded up to 8]
/// is work space.
extern const Op kMoeRoute;

/// Where a linear_add makes x and a moe_gate_up comes next, a GPU may let these two do all of it for few rows
/// (cuda/route_work.cuh): the logits are then sums over norm * x, rounded, and divided by the root after;
/// ids, weights, shared and groups are complete when moe_gate_up ends, and h is for it alone, unless the
/// graph has h as an output.
MoeRouteResult moe_route(Graph& g, std::string_view name, Tensor* x, Tensor* norm, const Weight& router,
                         int used, float eps, DType activation);

}  // namespace quern
