// gather_rows: y[r] = x[rows[r]]
//
// x F32 [T, D], rows I32 [R] -> y F32 [R, D]. A row outside [0, T) throws on the CPU; the GPU clamps it.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

/// inputs {x, rows}; outputs {y}.
extern const Op kGatherRows;

Tensor* gather_rows(Graph& g, std::string_view name, Tensor* x, Tensor* rows);

}  // namespace quern
