// linear_add: x' = residual + x W^T, and what the next norm and a router need of x' (residual.h)
//
// x [T, K], residual F32 [T, N] (of prompts that are not over ranks also one row for all, of stride 0), W [N, K] in any format of
// weight.h, segments stacked along N; the next norm; a router [E + 1, N] or none -> Residual of x' [T, N].
// Products of stored values and x are summed in FP32; scales of NVFP4 blocks are applied to partial sums inside one block, a
// segment's other scales after the sum.
//   logits [T, E + 1 rounded up to 8]: h times the router, without the norm's factor. F32; in answer steps with BF16
//   activations I64 in units of 2^-32: each sum over 16 columns is rounded to such units, so these sums may be added
//   in any order.
// Of ranks that each have some columns of W, and x of these, x W^T is the sum over the ranks, in their order. In prompt steps on
// GPUs each rank's part is rounded to BF16 first. All get the same bits. Every rank runs the same nodes in the same order (communicator.h); a backend that belongs to no ranks has its own part alone.
// A row's bits depend on that row and the kind of the step only.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct LinearAddParams {
    const Weight* weight;
    const Weight* router;  // or null
    StepKind kind;
    Sums sums;
};

/// Whether a prompt's squares are sums over 8 columns each (residual.h), which the product makes: then a router reads them, and
/// moe_gate_up, which alone may read these, adds them up once.
inline bool squares_in_parts(const LinearAddParams& p) { return p.router != nullptr && p.sums == Sums::none; }

/// Zeros for a sum without a residual. Of prompts one row that stands for all (a view of stride 0), which linear_add takes, too.
Tensor* no_residual(Graph& g, std::string_view name, int64_t tokens, int64_t width, StepKind kind);

/// inputs {x, residual, next norm} and, over ranks, zeros; outputs {x', h, squares} and, with a router, logits.
extern const Op kLinearAdd;

Residual linear_add(Graph& g, std::string_view name, Tensor* x, const Weight& w, Tensor* residual,
                    const NextNorm& next, const Weight* router = nullptr, const OverRanks& ranks = {});

}  // namespace quern
