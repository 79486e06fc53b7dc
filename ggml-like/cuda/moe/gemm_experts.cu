// Products of chosen experts with rows of prompts, grouped by expert (gemm_experts.h). Who owns which tile, shared memory,
// limits: expert_tour.cuh; without warpgroups linear/gemm.cuh.
//
//   grid of the latter: (expert, tile of rows) slow, tile of the expert's matrix fast, so that neighbouring blocks read
//   the same activations. A block finds its expert from the groups in device memory. The grid is sized for the worst spread
//   of rows over experts; blocks beyond the last tile leave at once.
#include "ggml-like/cuda/linear/gemm_tiles.h"
#include "ggml-like/cuda/moe/expert_shapes.h"
#include "ggml-like/cuda/moe/expert_tour.cuh"
#include "ggml-like/cuda/moe/expert_tour_fp8.h"
#include "ggml-like/cuda/moe/gemm_experts.h"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

void run_experts(Context& context, const PackedExperts& w, GemmTask task, const Along& along) {
    const int64_t pairs = static_cast<int64_t>(task.tokens) * task.used;
    task.data = w.data;
    task.factor = w.factor;
    task.tiles = w.tiles;
    task.chunks = w.chunks;
    task.cols = w.cols;
    task.expert_bytes = w.expert_bytes;
    task.experts = w.count;
    if (along.w != nullptr) {
        const Part& part = along.w->part[0];
        task.shared = {task.tokens, part.data, part.factor, static_cast<const bf16*>(along.x),
                       along.y,     along.ldy};
    }
    const ExpertsProduct product = choose(context, ExpertsShape{w.kind, pairs, w.count});
    const char* what = name_of(product);
    if (product == ExpertsProduct::middle)
        gemm_tiles(context, PromptProduct::middle, w.kind, what, task);
    else if (product == ExpertsProduct::many)
        gemm_tiles(context, PromptProduct::many, w.kind, what, task);
    else if (w.kind == Kind::bf16)
        launch_tour<Kind::bf16>(context, what, task);
    else if (w.kind == Kind::fp8)
        expert_tour_fp8(context, what, task);
    else
        launch_tour<Kind::nvfp4>(context, what, task);
}

}  // namespace

bool goes_along(const Context& context, const PackedExperts& w, const Packed& shared, int tokens, int used) {
    const Part& part = shared.part[0];
    const int64_t pairs = static_cast<int64_t>(tokens) * used;
    return choose(context, ExpertsShape{w.kind, pairs, w.count}) == ExpertsProduct::tour &&
           shared.parts == 1 && part.kind == w.kind && part.tiles == w.tiles && part.rows == w.rows &&
           shared.cols == w.cols;
}

bool takes_grouped(const Context& context, const PackedExperts& w, int tokens, int used) {
    const int64_t pairs = static_cast<int64_t>(tokens) * used;
    return choose(context, ExpertsShape{w.kind, pairs, w.count}) == ExpertsProduct::tour;
}

void gemm_gate_up(Context& context, const PackedExperts& w, const void* h, const RowScale& scale,
                  const int* groups, int tokens, int used, void* routed, const Along& along) {
    GemmTask task{};
    task.scale = scale;
    task.rows = w.rows / 2;
    task.paired = true;
    task.x = static_cast<const bf16*>(h);
    task.ldx8 = w.cols / 8;
    task.tokens = tokens;
    task.y = routed;
    task.ldy = w.rows / 2;
    task.groups = groups;
    task.used = used;
    run_experts(context, w, task, along);
}

void gemm_down(Context& context, const PackedExperts& w, const void* routed, const int* groups, int tokens,
               int used, void* terms, const Along& along) {
    GemmTask task{};
    task.rows = w.rows;
    task.x = static_cast<const bf16*>(routed);
    task.ldx8 = w.cols / 8;
    task.tokens = tokens;
    task.y = terms;
    task.ldy = w.rows;
    task.groups = groups;
    task.used = used;
    task.down = true;
    run_experts(context, w, task, along);
}

}  // namespace quern::cuda::moe
