// conv_silu: causal depthwise convolution over the sequence, then SiLU
//
// u [T, C] (columns view is fine), w F32 [C, W], state [slots, W-1 + J, C] -> y [T, C] in u's dtype.
//   y[t] = silu( sum_j w[:, j] * u[t - (W-1) + j] ),  j = W-1 is the row itself
// Rows before the batch come from the state: its first W-1 rows are the last committed inputs, oldest first.
// FP32 sum. Afterwards (journal = 0) those rows are the last W-1 inputs seen. With journal = 1 they stay, and
// the step's inputs go to rows W-1 .. (at most J); a later step with committed = n first moves the window by
// n rows.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

extern const Op kConvSilu;

Tensor* conv_silu(Graph& g, std::string_view name, Tensor* u, Tensor* w, Tensor* state, const Batch& batch);

}  // namespace quern
