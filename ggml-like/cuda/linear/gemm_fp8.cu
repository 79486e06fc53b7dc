// Products of FP8 matrices with rows of prompts by warpgroups (gemm_fp8.h). gemm_warpgroups.cuh has the kernel: who owns
// which tile, traffic, limits.
#include "ggml-like/cuda/linear/gemm_fp8.h"

#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"

namespace quern::cuda::linear {

void gemm_fp8(Context& context, PromptProduct product, const GemmTask& task) {
    launch_prompt<Kind::fp8>(context, product, task);
}

}  // namespace quern::cuda::linear
