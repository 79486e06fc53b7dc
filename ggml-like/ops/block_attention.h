// block_attention: grouped-query attention of a block of rows to cached positions before it and to itself
//
// q [T, H, d], k, v [T, G, d] (strided views are fine), q_norm, k_norm F32 [d]; k_cache, v_cache [pages, C, 64, d], of
// which heads first_head .. first_head + G - 1 are read -> y [T, H*d] in q's dtype. The rows of a sequence are its
// block: neighbours at rising positions, of which the first is P.
//   1. q', k' = x / sqrt(mean(x^2) + eps) * norm per head, rotated (rotary.h); FP32, one rounding to q's dtype.
//   2. query head h of a row at position p reads KV head h / (H/G): the cached keys of positions 0 .. P - 1 and the
//      block's own, of rows before and after it; with `causal` not those after it; with window W > 0 only those of
//      positions r with |p - r| < W.
//      y = softmax(q' k'^T / sqrt(d)) v; scores, softmax and sums in FP32; probabilities may be rounded to BF16.
// The cache is not written. Rows of no sequence (row_sequence = -1) are not computed; the CPU writes zeros there.
#pragma once

#include "ggml-like/ops/batch.h"
#include "ggml-like/ops/rotary.h"

namespace quern {

struct BlockAttentionParams {
    float eps;
    Rotary rotary;
    int64_t first_head = 0;
    int64_t window = 0;  // 0: none
    bool causal = false;
};

struct BlockAttentionInputs {
    Tensor* q;
    Tensor* k;
    Tensor* v;
    Tensor* q_norm;
    Tensor* k_norm;
};

/// inputs {q, k, v, q_norm, k_norm, positions, row_sequence, start, pages}; outputs {y, q', k', work}: the last three
/// are kernel scratch, work U8 [block_attention_work_bytes]. state {k_cache, v_cache}.
extern const Op kBlockAttention;

/// Parts that the cached keys of a sequence and KV head are split into on a GPU.
inline constexpr int64_t kMaxBlockSplits = 32;
int64_t block_attention_splits(int64_t sequences, int64_t kv_heads);
/// Kernel scratch for the partial results of split keys.
int64_t block_attention_work_bytes(int64_t tokens, int64_t sequences, int64_t heads, int64_t kv_heads,
                                   int64_t head_dim);

Tensor* block_attention(Graph& g, std::string_view name, const BlockAttentionInputs& in, Tensor* k_cache,
                        Tensor* v_cache, const Batch& batch, const BlockAttentionParams& params);

}  // namespace quern
