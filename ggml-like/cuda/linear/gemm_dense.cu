// Dense and paired products (gemm.h). gemm_warpgroups.cuh and gemm.cuh have the kernels: who owns which tile, traffic,
// limits. The choice among shapes: cuda/variants.h.
#include "ggml-like/cuda/linear/gemm.h"

#include "ggml-like/cuda/linear/gemm_fp8.h"
#include "ggml-like/cuda/linear/gemm_tiles.h"
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

void run_part(Context& context, Kind kind, const GemmTask& task, Split split) {
    const PromptProduct product =
        choose(context, PromptShape{kind, task.tokens, task.tiles, task.chunks, split == Split::by_matrix});
    switch (product) {
        case PromptProduct::many:
        case PromptProduct::middle:
        case PromptProduct::narrow:
        case PromptProduct::few:
            return gemm_tiles(context, product, kind, name_of(product), task);
        default:
            if (kind == Kind::bf16) return launch_prompt<Kind::bf16>(context, product, task);
            if (kind == Kind::fp8) return gemm_fp8(context, product, task);
            launch_prompt<Kind::nvfp4>(context, product, task);
    }
}

/// Kernels of prompts read one number of squares a row.
void check_scale(const RowScale& scale) {
    if (scale.numbers > 1) unsupported("gemm", "squares in parts");
}

}  // namespace

bool has_warpgroups() {
    cudaFuncAttributes attributes{};
    check_launch(cudaFuncGetAttributes(&attributes, warpgroup_kernel<Kind::bf16, Wide>), "gemm");
    return attributes.sharedSizeBytes > 0;
}

void gemm(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens, const GemmOutput& out,
          Split split) {
    check_scale(out.scale);
    for (int i = 0; i < w.parts; ++i) {
        GemmTask task = part_task(w, w.part[i], static_cast<const bf16*>(x), ldx, tokens);
        const int64_t at = w.part[i].row_begin;
        if (out.defer.h != nullptr && (at % kTileRows != 0 || task.rows % kTileRows != 0))
            unsupported("gemm", "a norm after parts that are no whole tiles");
        task.f32 = out.f32;
        task.y = static_cast<uint8_t*>(out.y) + at * (out.f32 ? 4 : 2);
        task.ldy = out.ld;
        task.residual = out.residual == nullptr ? nullptr : out.residual + at;
        task.residual_ld = out.residual_ld;
        task.scale = out.scale;
        task.defer = out.defer;
        task.defer_begin = static_cast<int>(at);
        run_part(context, w.part[i].kind, task, split);
    }
}

void gemm_paired(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens,
                 const GatedOutput& out) {
    check_scale(out.scale);
    for (int i = 0; i < w.parts; ++i) {
        GemmTask task = part_task(w, w.part[i], static_cast<const bf16*>(x), ldx, tokens);
        task.paired = true;
        task.rows = w.part[i].rows / 2;
        task.y = out.y + w.part[i].row_begin / 2;
        task.ldy = out.ld;
        task.scale = out.scale;
        run_part(context, w.part[i].kind, task, Split::never);
    }
}

}  // namespace quern::cuda::linear
