// gather_rows: y[r] = x[rows[r]]
//
// x [T, D], rows I32 [R] -> y [R, D] in x's dtype, bits unchanged. A row outside [0, T) throws.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

extern const Op kGatherRows;

Tensor* gather_rows(Graph& g, std::string_view name, Tensor* x, Tensor* rows);

}  // namespace quern
