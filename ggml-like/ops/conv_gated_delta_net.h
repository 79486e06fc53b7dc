// conv_gated_delta_net: causal convolution with SiLU, gated delta rule over each sequence, norm gated by z
//
// u [T, C], C = 2*nk*dk + nv*dv: q heads, k heads, v heads; a, b [T, nv]; z [T, nv, dv] (all four may be views);
// conv F32 [C, W]; decay_rate F32 [nv] = -exp(A_log), dt_bias F32 [nv]; norm F32 [dv] (plain form)
// -> y [T, nv*dv] in u's dtype.
//   x[t] = silu( sum_j conv[:, j] * u[t - (W-1) + j] ),  j = W-1 is the row itself; FP32, rounded once to
//          u's dtype
// then per row and value head j (key head j / (nv/nk)), all in FP32, S = state[slot][j] read as S[v][k]:
//   q = x_q / sqrt(sum x_q^2 + 1e-6) / sqrt(dk);   k = x_k / sqrt(sum x_k^2 + 1e-6)
//   g = decay_rate * softplus(a + dt_bias);        beta = sigmoid(b)
//   S = exp(g) S;   u = beta (v - S k);   S = S + u k^T;   o = S q, rounded to u's dtype
//   y = (o / sqrt(mean(o^2) + eps) * norm) * silu(z), FP32, rounded once
// Prompt rows may be computed in chunks of 64 with BF16 products: relative error of o below 1e-2; of S, whose
// products take pairs of BF16 numbers, below 1e-4. Chunks begin where the step's slice of a sequence begins.
//
// State (batch.h says when a sequence starts from zero):
//   conv_state [slots, R, C], R >= W - 1 + max(1, J): row p % R holds the input u of position p. A step of up to
//     R - W + 1 rows never overwrites what it reads; if not all rows of a step are committed, the next one still
//     finds its window.
//   delta F32 [slots, nv, dv, dk].
//   Journal of J entries a slot: journal_k F32 [slots, J, nk, dk] (normalised k), journal_u F32
//     [slots, J, nv, dv], journal_g F32 [slots, J, nv]; all null if J = 0. A step first does S = exp(g) S + u k^T
//     for committed[s] entries, with the bits that their rows would have left. Only answer steps journal. J is at most
//     kMaxJournalEntries.
// Source: Yang et al. 2024 (Gated DeltaNet); HF transformers Qwen3_5Moe.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

inline constexpr int64_t kMaxJournalEntries = 16;  // a GPU's kernel holds all of them

struct ConvGatedDeltaNetParams {
    int key_heads;                     // nk
    int value_heads;                   // nv, a multiple of nk
    int key_dim;                       // dk
    int value_dim;                     // dv
    float eps;                         // of the norm
    StepKind kind = StepKind::prompt;  // the batch's: conv_gated_delta_net sets it
    bool drafts = true;                // whether rows may go to the journal; if not, batch.journal is zeros
};

struct DeltaInputs {
    Tensor* u;
    Tensor* a;
    Tensor* b;
    Tensor* conv;
    Tensor* decay_rate;
    Tensor* dt_bias;
    Tensor* z;
    Tensor* norm;
};

struct DeltaState {
    Tensor* conv = nullptr;
    Tensor* delta = nullptr;
    Tensor* journal_k = nullptr;
    Tensor* journal_u = nullptr;
    Tensor* journal_g = nullptr;
};

/// inputs {u, a, b, conv, decay_rate, dt_bias, positions, start, slots, committed, journal, z, norm}; outputs
/// {y, o, x, work}: o [T, nv, dv] and x [T, C] in u's dtype and work U8 [delta_work_bytes] are kernel scratch. So is `told` I32
/// [delta_told_counts], zeros before, the last output where there are any.
/// state {conv, delta} or, with a journal, {conv, delta, journal_k, journal_u, journal_g}.
extern const Op kConvGatedDeltaNet;

/// Kernel scratch: what the chunks need, or in the plain kernel a copy of each sequence's S.
int64_t delta_work_bytes(StepKind kind, int64_t tokens, int64_t sequences,
                         const ConvGatedDeltaNetParams& params);

/// Numbers by which a GPU's kernels of prompts in chunks tell each other what is there; 0: there are no such kernels.
int64_t delta_told_counts(int64_t tokens, int64_t sequences, const ConvGatedDeltaNetParams& params);

Tensor* conv_gated_delta_net(Graph& g, std::string_view name, const DeltaInputs& in, const DeltaState& state,
                             const Batch& batch, const ConvGatedDeltaNetParams& params);

}  // namespace quern
