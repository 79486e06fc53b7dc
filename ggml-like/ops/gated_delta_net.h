// gated_delta_net: the gated delta rule over each sequence, with its recurrent state
//
// qkv [T, 2*nk*dk + nv*dv] (q heads, k heads, v heads), a, b [T, nv] (column views are fine),
// decay_rate F32 [nv] = -exp(A_log), dt_bias F32 [nv], state F32 [slots, nv, dv, dk] -> o [T, nv, dv] in
// qkv's dtype. Per row and value head j (key head j / (nv/nk)), all in FP32, S = state[slot][j] read as
// S[v][k]:
//   q = q / sqrt(sum q^2 + 1e-6) / sqrt(dk);   k = k / sqrt(sum k^2 + 1e-6)
//   g = decay_rate * softplus(a + dt_bias);    beta = sigmoid(b)
//   S = exp(g) S;   u = beta (v - S k);   S = S + u k^T;   o = S q
// Journal (see batch.h), J entries a slot: journal_k F32 [slots, J, nk, dk] (normalised k), journal_u F32
// [slots, J, nv, dv], journal_g F32 [slots, J, nv]. The step first does S = exp(g) S + u k^T for committed[s]
// entries. J = 0: pass null tensors. Source: Yang et al. 2024 (Gated DeltaNet); HF transformers Qwen3_5Moe.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

struct GatedDeltaNetParams {
    int key_heads;    // nk
    int value_heads;  // nv, a multiple of nk
    int key_dim;      // dk
    int value_dim;    // dv
};

struct DeltaState {
    Tensor* state = nullptr;
    Tensor* journal_k = nullptr;
    Tensor* journal_u = nullptr;
    Tensor* journal_g = nullptr;
};

extern const Op kGatedDeltaNet;

Tensor* gated_delta_net(Graph& g, std::string_view name, Tensor* qkv, Tensor* a, Tensor* b,
                        Tensor* decay_rate, Tensor* dt_bias, const DeltaState& state, const Batch& batch,
                        const GatedDeltaNetParams& params);

}  // namespace quern
