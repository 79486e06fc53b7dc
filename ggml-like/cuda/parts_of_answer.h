// The end of a product of which each rank has a part, where the product's own kernels do not add up over ranks.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"

namespace quern::cuda {

/// Answers: x = residual + y of all ranks in their order, FP32, and h and squares of x: `count` numbers, as in all_reduce_add. y may
/// be x. Defined in ops/all_reduce_add.cu.
void add_parts_of_answer(Context& context, const float* y, const float* residual, float* x,
                         const linear::Defer& defer, int64_t count);

}  // namespace quern::cuda
