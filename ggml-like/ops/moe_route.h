// moe_route: chooses K experts a row, and the shared expert's gate
//
// x [T, D], router [E + 1, D]: segments {gate [E, D], shared_expert_gate [1, D]} ->
//   ids I32 [T, K] in falling order of probability, ties to the lower id
//   weights F32 [T, K] = softmax over all E logits, the chosen ones renormalised to sum 1
//   shared F32 [T] = sigmoid(shared_expert_gate . x)
// Logits and softmax in FP32. A NaN logit never wins; if fewer than K are finite the op throws.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct MoeRouteParams {
    const Weight* router;
    int used;  // K
};

struct MoeRouteResult {
    Tensor* ids;
    Tensor* weights;
    Tensor* shared;
};

extern const Op kMoeRoute;

MoeRouteResult moe_route(Graph& g, std::string_view name, Tensor* x, const Weight& router, int used);

}  // namespace quern
