// residual_add: x' = residual + y, and what the next norm and a router need of x' (residual.h)
//
// y, residual F32 [T, D]; the next norm; a router [E + 1, D] or none -> Residual of x' [T, D], its logits as of linear_add.
// It ends a product whose sum comes from several ranks (all_reduce.h), where linear_add and moe_down end their own. A row's
// bits depend on that row and the kind of the step only.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct ResidualAddParams {
    const Weight* router;  // or null
    StepKind kind;
};

/// inputs {y, residual, next norm}; outputs {x', h, squares} and, with a router, logits.
extern const Op kResidualAdd;

Residual residual_add(Graph& g, std::string_view name, Tensor* y, Tensor* residual, const NextNorm& next,
                      const Weight* router = nullptr);

}  // namespace quern
