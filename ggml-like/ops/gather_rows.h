// gather_rows: h[r] = h[rows[r]], squares[r] = squares[rows[r]] (residual.h)
//
// h [T, D], squares F32 [T, P], rows I32 [R] -> h [R, D], squares [R, P]; x is not gathered. A row outside [0, T)
// throws on the CPU; the GPU clamps it.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

/// inputs {h, squares, rows}; outputs {h, squares}.
extern const Op kGatherRows;

Residual gather_rows(Graph& g, std::string_view name, const Residual& in, Tensor* rows);

}  // namespace quern
