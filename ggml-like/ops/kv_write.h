// kv_write: norm and rotation of keys, and the writing of keys and values to a cache
//
// k, v [T, N, d] (strided views are fine), k_norm F32 [M, d] with M a divisor of N: each norm serves N / M neighbouring
// heads; k_cache, v_cache [pages, N, 64, d].
//   k' = k / sqrt(mean(k^2) + eps) * norm per head, rotated (rotary.h); FP32, one rounding to the cache's dtype.
//   k' and v of row t (sequence s, position p) go to page pages[s][p / 64], place p % 64. Rows of no sequence
//   (row_sequence = -1) are skipped.
#pragma once

#include "ggml-like/ops/batch.h"
#include "ggml-like/ops/rotary.h"

namespace quern {

struct KvWriteParams {
    float eps;
    Rotary rotary;
};

/// inputs {k, v, k_norm, positions, row_sequence, pages}; no outputs; state {k_cache, v_cache}.
extern const Op kKvWrite;

void kv_write(Graph& g, std::string_view name, Tensor* k, Tensor* v, Tensor* k_norm, Tensor* k_cache,
              Tensor* v_cache, const Batch& batch, const KvWriteParams& params);

}  // namespace quern
