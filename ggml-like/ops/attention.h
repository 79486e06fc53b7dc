// attention: causal grouped-query attention over the paged cache, times an output gate
//
// q [T, H, d], gate [T, H, d] (strided view is fine), k_cache, v_cache [pages, G, 64, d] -> y [T, H*d] in q's
// dtype.
//   query head h reads KV head h / (H/G);  keys 0 .. position of the row, its own included
//   y = softmax(q k^T / sqrt(d)) v * sigmoid(gate)
// Scores, softmax (maximum subtracted) and sums in FP32; one rounding. The row's own k and v must be written
// before.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

extern const Op kAttention;

Tensor* attention(Graph& g, std::string_view name, Tensor* q, Tensor* gate, Tensor* k_cache, Tensor* v_cache,
                  const Batch& batch);

}  // namespace quern
