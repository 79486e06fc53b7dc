// concat: y[t] = [x0[t] | x1[t] | ...], rounded once
//
// x F32 [T, D], up to kMaxConcat of them -> y [T, n D] in `dtype`.
#pragma once

#include <vector>

#include "ggml-like/graph.h"

namespace quern {

inline constexpr int kMaxConcat = 16;

/// inputs {x0, x1, ...}; outputs {y}.
extern const Op kConcat;

Tensor* concat(Graph& g, std::string_view name, const std::vector<Tensor*>& x, DType dtype);

}  // namespace quern
