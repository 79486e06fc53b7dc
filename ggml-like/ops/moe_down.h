// moe_down: x' = x + sum_j weights[j] * (down_{ids[j]} routed[j]) + shared_gate * (down_shared shared), and what the
// next norm needs of x' (residual.h)
//
// The outputs of moe_gate_up, residual x F32 [T, D], experts: E weights [D, F], shared_down [D, Fs], the next norm
// -> Residual of x' [T, D]. Each product is an FP32 sum as in linear_add; prompt steps on a GPU round it to BF16, and so do answer steps
// that it makes as prompts' (cuda/variants.h: as_prompt).
// A row's terms are added in the order of its choices, the shared expert's last, so its bits depend on that row and
// the kind of the step only.
// Of ranks that each have some columns of all experts, the terms' sum is added up over the ranks as in linear_add.
#pragma once

#include "ggml-like/ops/moe_gate_up.h"

namespace quern {

struct MoeDownParams {
    const ExpertWeights* experts;
    const Weight* shared;
    StepKind kind;
    Sums sums;
    /// Of the moe_gate_up before.
    const ExpertWeights* gate_up_experts;
    const Weight* gate_up_shared;
    bool permuted;  // whether it has `permuted`
};

/// inputs {routed, shared, ids, weights, shared_gate, groups, ready, residual, next norm}, over ranks zeros, and `permuted`, if there is
/// one; outputs {x', h, squares, terms}: terms [T * (K + 1), D] is kernel scratch, F32 in answer steps, else in routed's dtype.
extern const Op kMoeDown;

Residual moe_down(Graph& g, std::string_view name, const MoeGateUpResult& in, Tensor* residual,
                  const ExpertWeights& experts, const Weight& shared, const NextNorm& next,
                  const OverRanks& ranks = {});

}  // namespace quern
