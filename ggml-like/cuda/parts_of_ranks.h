// The end of a product of which each rank has a part, where the product's own kernels do not add up over ranks: x = residual + the
// parts of all ranks in their order, FP32, and h and squares of x, as in all_reduce_add. Defined in ops/all_reduce_add.cu.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"

namespace quern::cuda {

/// y: the part, `count` numbers, which may be x.
void add_parts_of_answer(Context& context, const float* y, const float* residual, float* x,
                         const linear::Defer& defer, int64_t count);
/// The part is in defer.h, in BF16. whole: x of all rows; else of those that this rank adds up.
void add_parts_of_prompt(Context& context, const float* residual, float* x, const linear::Defer& defer,
                         int64_t count, bool whole);

}  // namespace quern::cuda
