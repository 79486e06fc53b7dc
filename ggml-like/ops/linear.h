// linear: y = x W^T
//
// x [T, K], W [N, K] in any format of weight.h, segments stacked along N -> y [T, N] in `dtype`.
// Products of stored values and x are summed in FP32 in an order that depends only on K; scales of NVFP4
// blocks are applied to the partial sum of their 16 products, a segment's other scales after the sum; one
// rounding at the end. A row's result does not depend on T: alone or in a batch, the same bits.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct LinearParams {
    const Weight* weight;
};

extern const Op kLinear;

Tensor* linear(Graph& g, std::string_view name, Tensor* x, const Weight& w, DType dtype);

namespace cpu {
struct Context;
/// The same product into plain floats, y[t * ldy + n], for ops that need it inside: unrounded, same bits as
/// `linear`. Uses context buffers 0 and 1.
void linear_rows(const Tensor& x, const Weight& w, float* y, int64_t ldy, Context& context);
}  // namespace cpu

}  // namespace quern
