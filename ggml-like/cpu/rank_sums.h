// What ends a product of which each rank has a part, on the CPU.
#pragma once

#include "ggml-like/cpu/context.h"
#include "ggml-like/tensor.h"

namespace quern::cpu {

/// x' = residual + the ranks' parts [T, D], in their order, FP32; h and squares of x' (ops/residual.h). `part` is not x'.
void add_over_ranks(const float* part, const Tensor& residual, const Tensor& norm, const Tensor& x,
                    const Tensor& h, const Tensor& squares, Context& context);

}  // namespace quern::cpu
