// all_reduce_add: x' = residual + the sum of y over the ranks, and what the next norm and a router need of x' (residual.h)
//
// y F32 [T, D], of each rank its part of a product; residual F32 [T, D], the same on all; the next norm; a router [E + 1, D] or
// none -> Residual of x' [T, D], its logits as of linear_add. The parts are added in the order of the ranks, then the sum to
// the residual, in FP32; in prompt steps on GPUs each part is rounded to BF16 first. All ranks get the same bits. Products of which each rank has some columns end so themselves (linear_add,
// moe_down); by itself it is what tests compare them with. Every rank runs the same nodes of this op in the same order (communicator.h); a
// backend that belongs to no ranks has y alone. A row's bits depend on that row and the kind of the step only.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct AllReduceAddParams {
    const Weight* router;  // or null
    StepKind kind;
};

/// inputs {y, residual, next norm}; outputs {x', h, squares} and, with a router, logits.
extern const Op kAllReduceAdd;

Residual all_reduce_add(Graph& g, std::string_view name, Tensor* y, Tensor* residual, const NextNorm& next,
                        const Weight* router = nullptr);

}  // namespace quern
