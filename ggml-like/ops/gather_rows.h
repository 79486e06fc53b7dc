// gather_rows: a[r] = a[rows[r]], b[r] = b[rows[r]]: rows of two matrices, such as h and squares (residual.h)
//
// a [T, D] in the activations' type, b F32 [T, P], rows I32 [R] -> a [R, D], b [R, P]. A row outside [0, T) throws on the
// CPU; the GPU clamps it.
#pragma once

#include <utility>

#include "ggml-like/ops/residual.h"

namespace quern {

/// inputs {a, b, rows}; outputs {a, b}.
extern const Op kGatherRows;

std::pair<Tensor*, Tensor*> gather_rows(Graph& g, std::string_view name, Tensor* a, Tensor* b, Tensor* rows);
/// h and squares; x is not gathered.
Residual gather_rows(Graph& g, std::string_view name, const Residual& in, Tensor* rows);

}  // namespace quern
