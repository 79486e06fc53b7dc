// moe_gate_up: the choice of K experts a row, then silu(gate h') * (up h') of each of them and of the shared expert
//
// In: h [T, D], squares (residual.h), logits (linear_add.h); h and logits lack the norm's factor r = 1 / rms, h' = r h.
// experts: E weights [2F, D] of segments {gate [F, D], up [F, D]}; shared: one such weight with its own width Fs.
//   ids I32 [T, K] in falling order of logit, ties to the lower id
//   weights F32 [T, K]: softmax of r * logits over all E, the chosen ones renormalised to sum 1
//   shared_gate F32 [T] = sigmoid(r * logit E)
//   groups I32 [E + 1 + T*K]: E + 1 offsets, then the pairs (t*K + j) of each expert, rising: expert e owns
//     pairs[offset[e]] .. pairs[offset[e+1] - 1]
//   routed [T, K, F], shared [T, Fs] in h's dtype: both products are FP32 sums as in linear_add, times r; silu and the
//     product of the two in FP32; one rounding. A GPU's rows of routed in a prompt step, and in an answer step that it makes as one, are in
//     the order of groups' pairs.
//   ready I64 [told_words(T, K)], zeros before: a GPU tells moe_down here what was chosen, or that ids, weights, gate and groups are
//     complete, before routed and shared are
// Answer steps on a GPU: the bits of a row depend on itself alone for up to 512 choices T * K.
// NaN counts as the lowest logit. If fewer than K logits of a row are numbers, the lowest ids of the others are chosen
// too and the row's weights are NaN; other rows do not change.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct MoeGateUpParams {
    const ExpertWeights* experts;
    const Weight* shared;
    int used;  // K
    float eps;
    StepKind kind;
};

/// Rows up to which `ready` has two words for each row's K + 1 terms; of one row, and of more rows, K + 1 words.
inline constexpr int64_t kToldRows = 8;
constexpr int64_t told_words(int64_t rows, int64_t used) {
    return rows > 1 && rows <= kToldRows ? 2 * rows * (used + 1) : used + 1;
}

/// Answer steps of 2 to kToldRows rows have `permuted`, if F = Fs is a multiple of 64; else it is null. A GPU leaves routed and shared
/// there once more, rows of tokens, then of pairs by expert, as its kernel of moe_down holds them (cuda/moe/down_fp4_few.cu).
struct MoeGateUpResult {
    Tensor *routed, *shared, *ids, *weights, *shared_gate, *groups, *ready, *permuted;
    const ExpertWeights* experts;  // of this op
    const Weight* shared_expert;
};
/// Bytes of a row of `permuted`.
constexpr int64_t permuted_row_bytes(int64_t width) { return 2 * width + 64; }

/// inputs {h, squares, logits}; outputs in the order of MoeGateUpResult, but before `permuted` factor F32 [T]; in prompt steps, and
/// of FP8 experts, also rows of h for all pairs, [T * K, D] in h's dtype, and I32 [T * K], where groups has each pair. All of these are
/// kernel scratch.
extern const Op kMoeGateUp;

MoeGateUpResult moe_gate_up(Graph& g, std::string_view name, const Residual& in, const ExpertWeights& experts,
                            const Weight& shared, int used, float eps, StepKind kind);

}  // namespace quern
