// Products of chosen experts in FP8 (expert_tour_fp8.h). expert_tour.cuh has the kernel: who owns which tile, traffic, limits.
#include "ggml-like/cuda/moe/expert_tour_fp8.h"

#include "ggml-like/cuda/moe/expert_tour.cuh"

namespace quern::cuda::moe {

void expert_tour_fp8(Context& context, const char* what, const linear::GemmTask& task) {
    launch_tour<pack::Kind::fp8>(context, what, task);
}

}  // namespace quern::cuda::moe
