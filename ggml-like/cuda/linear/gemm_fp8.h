// Products of FP8 matrices with rows of prompts by warpgroups: a file of their own, as they take long to compile.
#pragma once

#include "ggml-like/cuda/linear/gemm_task.cuh"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::linear {

/// `product`: of those for warpgroups.
void gemm_fp8(Context& context, PromptProduct product, const GemmTask& task);

}  // namespace quern::cuda::linear
