// Products with rows of prompts without warpgroups (gemm_tiles.h). gemm.cuh has the kernel: who owns which tile, traffic,
// limits.
#include "ggml-like/cuda/linear/gemm_tiles.h"

#include "ggml-like/cuda/linear/gemm.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

template <class S>
void run(Context& context, Kind kind, const char* what, const GemmTask& task) {
    if (kind == Kind::bf16) return launch_gemm<Kind::bf16, S>(context, what, task);
    if (kind == Kind::fp8) return launch_gemm<Kind::fp8, S>(context, what, task);
    launch_gemm<Kind::nvfp4, S>(context, what, task);
}

}  // namespace

void gemm_tiles(Context& context, PromptProduct shape, Kind kind, const char* what, const GemmTask& task) {
    switch (shape) {
        case PromptProduct::many:
            return run<Many>(context, kind, what, task);
        case PromptProduct::middle:
            return run<Middle>(context, kind, what, task);
        case PromptProduct::narrow:
            return run<Narrow>(context, kind, what, task);
        default:
            return run<Few>(context, kind, what, task);
    }
}

}  // namespace quern::cuda::linear
