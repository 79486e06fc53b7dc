// gated_attention: norm and rotation of q and k, KV write, causal grouped-query attention, output gate
//
// q, gate [T, H, d], k, v [T, G, d] (strided views are fine), q_norm, k_norm F32 [d] (plain form), k_cache,
// v_cache [pages, G, 64, d] in a format of kv_format.h -> y [T, H*d] in q's dtype.
//   1. q', k' = x / sqrt(mean(x^2) + eps) * norm per head; for i < R/2: angle = position * theta^(-2i/R), and
//      the pair (i, i + R/2) rotates by it; dimensions from R on pass through. FP32, one rounding to q's
//      dtype. With rope I32 [3, T] the pair i takes, in place of `position`, rope[1][t] if i % 3 = 1 and i < 3 * row_pairs, rope[2][t]
//      if i % 3 = 2 and i < 3 * column_pairs, else rope[0][t] (interleaved M-RoPE).
//   2. k' and v of row t (sequence s, position p) go to page pages[s][p / 64], place p % 64, rounded to the
//      cache's dtype or packed from FP32 (kv_format.h; with keys in tq4, q' and k' are multiplied by H first). Padding
//      rows (row_sequence = -1) are skipped everywhere.
//   3. query head h reads KV head h / (H/G), keys 0 .. p of its sequence, as stored in the cache:
//      y = softmax(q' k'^T / sqrt(d)) v * sigmoid(gate); scores, softmax (maximum subtracted) and sums in
//      FP32; one rounding. Probabilities may be rounded to BF16 before the product with v.
// Of rows whose y is not wanted only k' and v are kept; y and rotated are left undefined there.
// A row's bits depend on the kind of its step (batch.h), its position and its keys alone.
// Source: HF transformers Qwen3_5Moe.
#pragma once

#include <vector>

#include "ggml-like/ops/batch.h"

namespace quern {

struct GatedAttentionParams {
    float eps;
    float theta;
    int rotary_dims;                      // R, even
    StepKind kind = StepKind::prompt;     // the batch's: gated_attention sets it
    int64_t rows = 0;                     // whose y is wanted, at most: gated_attention sets it
    int row_pairs = 0, column_pairs = 0;  // with rope
    // Scales of keys and values in fp8 and nvfp4: none (from the values), one, or one for each KV head.
    std::vector<float> k_scale = {}, v_scale = {};

    /// By which of the three axes the pair i rotates.
    int axis(int i) const {
        return i % 3 == 1 && i < 3 * row_pairs ? 1 : i % 3 == 2 && i < 3 * column_pairs ? 2 : 0;
    }
    /// That of a head; 0: from the values.
    float scale(bool values, int64_t kv_head) const {
        const std::vector<float>& s = values ? v_scale : k_scale;
        return s.empty() ? 0.0f : s[s.size() == 1 ? 0 : static_cast<size_t>(kv_head)];
    }
};

/// Rows of prompts whose y is wanted: I32 [S] the first one of each sequence, which those after it follow (the next sequence's first
/// row: it has none), and how many they are at most. Null: all rows.
struct WantedRows {
    Tensor* from = nullptr;
    int64_t count = 0;
};

struct AttentionInputs {
    Tensor* q;
    Tensor* gate;
    Tensor* k;
    Tensor* v;
    Tensor* q_norm;
    Tensor* k_norm;
    WantedRows wanted = {};
};

/// inputs {q, gate, k, v, q_norm, k_norm, positions, row_sequence, start, pages, WantedRows::from or start} and, if there is one, rope;
/// outputs {y, rotated, work}: rotated [T, H, d] in q's dtype and work U8 [attention_work_bytes] are kernel scratch. state {k_cache,
/// v_cache}.
extern const Op kGatedAttention;

/// Kernel scratch for the partial results of split keys; `packed`: the caches are.
int64_t attention_work_bytes(StepKind kind, bool packed, int64_t tokens, int64_t kv_heads, int64_t head_dim);

Tensor* gated_attention(Graph& g, std::string_view name, const AttentionInputs& in, Tensor* k_cache,
                        Tensor* v_cache, const Batch& batch, const GatedAttentionParams& params);

}  // namespace quern
