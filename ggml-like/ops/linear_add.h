// linear_add: y = residual + x W^T
//
// x [T, K], residual F32 [T, N], W [N, K] in any format of weight.h, segments stacked along N -> y F32 [T,
// N]. Products of stored values and x are summed in FP32 in an order that depends only on K; scales of NVFP4
// blocks are applied to partial sums inside one block, a segment's other scales after the sum. A row's result
// does not depend on T up to 8 rows: alone or in a batch, the same bits (on the CPU: for any T).
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct LinearAddParams {
    const Weight* weight;
};

/// inputs {x, residual}; outputs {y}.
extern const Op kLinearAdd;

Tensor* linear_add(Graph& g, std::string_view name, Tensor* x, const Weight& w, Tensor* residual);

}  // namespace quern
