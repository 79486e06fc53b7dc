// Products with rows of prompts without warpgroups: gemm.cuh's kernels, of dense matrices and of chosen experts.
#pragma once

#include "ggml-like/cuda/linear/gemm_task.cuh"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::linear {

/// shape: many, middle, or of a split matrix narrow or few. what: the launch's name.
void gemm_tiles(Context& context, PromptProduct shape, Kind kind, const char* what, const GemmTask& task);

}  // namespace quern::cuda::linear
