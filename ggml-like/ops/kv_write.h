// kv_write: stores k and v of each row in the page of its position
//
// k, v [T, G, d] -> k_cache, v_cache [pages, G, 64, d] (state), rounded to the cache's dtype.
// Row t of sequence s at position p goes to page pages[s][p / 64], place p % 64. Padding rows are skipped.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

extern const Op kKvWrite;

void kv_write(Graph& g, std::string_view name, Tensor* k, Tensor* v, Tensor* k_cache, Tensor* v_cache,
              const Batch& batch);

}  // namespace quern
