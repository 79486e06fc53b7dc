// moe_down: y = residual + sum_j weights[j] * (down_{ids[j]} routed[j]) + shared_gate * (down_shared shared)
//
// routed [T, K, F], shared [T, Fs], ids I32 [T, K], weights F32 [T, K], shared_gate F32 [T], groups
// (moe_route.h), residual F32 [T, D], experts: E weights [D, F], shared_down [D, Fs] -> y F32 [T, D]. Each
// product is an FP32 sum as in linear_add. On the CPU, and up to 8 rows everywhere, the K terms are added in
// an order that depends on nothing but K; with NVFP4 weights up to 64 rows. A kernel for many rows may round
// each term's product to BF16.
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
    Tensor* groups;
    Tensor* residual;
};

/// inputs in the order of MoeDownInputs; outputs {y, terms}: terms [T * (K + 1), D] is work space, F32 if T
/// <= 64, else in routed's dtype.
extern const Op kMoeDown;

Tensor* moe_down(Graph& g, std::string_view name, const MoeDownInputs& in, const ExpertWeights& experts,
                 const Weight& shared);

}  // namespace quern
