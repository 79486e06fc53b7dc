// Products of chosen experts in FP8 with rows of prompts: a file of their own, as they take long to compile.
#pragma once

#include "ggml-like/cuda/linear/gemm_task.cuh"

namespace quern::cuda::moe {

/// As expert_tour.cuh has it; `what`: for messages.
void expert_tour_fp8(Context& context, const char* what, const linear::GemmTask& task);

}  // namespace quern::cuda::moe
