// The end of a product of which each rank has a part, where the product's own kernels do not add up over ranks: x = residual + y
// of all ranks in their order, FP32, and h and squares of x, as in all_reduce_add. y may be x. Defined in ops/all_reduce_add.cu.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"

namespace quern::cuda {

/// `count` numbers.
void add_parts_of_answer(Context& context, const float* y, const float* residual, float* x,
                         const linear::Defer& defer, int64_t count);
/// whole: x of all rows; else of those that this rank adds up.
void add_parts_of_prompt(Context& context, const float* y, const float* residual, float* x,
                         const linear::Defer& defer, int64_t count, bool whole);

}  // namespace quern::cuda
