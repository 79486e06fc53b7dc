// moe_down: y = sum_j weights[j] * (down_{ids[j]} routed[j]) + shared_gate * (down_shared shared)
//
// routed [T, K, F], shared [T, Fs], ids I32 [T, K], weights F32 [T, K], shared_gate F32 [T],
// experts: E weights [D, F], shared_down [D, Fs] -> y [T, D] in routed's dtype.
// Each product is an FP32 sum as in `linear`; the K terms are added in the order of ids, the shared one last,
// in FP32; one rounding.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct MoeDownParams {
    const ExpertWeights* experts;
    const Weight* shared;
};

struct MoeDownInputs {
    Tensor* routed;
    Tensor* shared;
    Tensor* ids;
    Tensor* weights;
    Tensor* shared_gate;
};

extern const Op kMoeDown;

Tensor* moe_down(Graph& g, std::string_view name, const MoeDownInputs& in, const ExpertWeights& experts,
                 const Weight& shared);

}  // namespace quern
