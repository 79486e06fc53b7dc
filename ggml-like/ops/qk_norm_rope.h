// qk_norm_rope: per-head RMS norm of q and k, then rotary embedding of their first R dimensions
//
// q_in [T, H, d] and k_in [T, G, d] (strided views are fine), wq, wk F32 [d] (plain form) ->
// q [T, H, d], k [T, G, d] contiguous, in q_in's dtype.
//   x' = x / sqrt(mean(x^2) + eps) * w
//   for i < R/2:  angle = position * theta^(-2i/R);  pairs (i, i + R/2) rotate by it;  dimensions >= R pass
//   through
// FP32 throughout (angle and its sine in FP64 on the CPU), one rounding. Source: HF transformers Qwen3_5Moe;
// for text the three M-RoPE axes are equal, so the interleaved sections do not show.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

struct QkNormRopeParams {
    float eps;
    float theta;
    int rotary_dims;  // R, even
};

struct QkNormRopeResult {
    Tensor* q;
    Tensor* k;
};

extern const Op kQkNormRope;

QkNormRopeResult qk_norm_rope(Graph& g, std::string_view name, Tensor* q_in, Tensor* k_in, Tensor* wq,
                              Tensor* wk, const Batch& batch, const QkNormRopeParams& params);

}  // namespace quern
