// arrived_rows: where the residual stream begins on a device that goes on where another one has stopped
//
// Computes nothing: x F32 [T, D], h and squares (residual.h) are what the other device's last layer has left, copied here
// before each run (Backend::receive), bit for bit. Nothing else uses their memory from the beginning of a run to their last reader.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

/// outputs {x, h, squares}.
extern const Op kArrivedRows;

/// `norm`: the one that the other device has applied: h is x times its weights.
Residual arrived_rows(Graph& g, std::string_view name, int64_t tokens, int64_t width, const NextNorm& norm);
/// Of x alone, after an earlier layer: F32 [T, D]. No other node may come before it.
Tensor* arrived_tap(Graph& g, std::string_view name, int64_t tokens, int64_t width);

}  // namespace quern
