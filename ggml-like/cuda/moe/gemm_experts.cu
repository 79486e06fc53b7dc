// Products of chosen experts with rows of prompts, grouped by expert (gemm_experts.h). linear/gemm.cuh and
// linear/gemm_warpgroups.cuh have the kernels: who owns which tile, shared memory, limits.
//
//   grid: (expert, tile of rows) slow, tile of the expert's matrix fast, so that neighbouring blocks read the same
//   activations. A block finds its expert from the groups in device memory. The grid is sized for the worst spread of
//   rows over experts; blocks beyond the last tile leave at once.
//
// Measured for 2,048 rows in a prompt of 8K: gate and up 284 us, 272 TFLOP/s; down 250 us, 154 TFLOP/s; together half
// of its time. The same kernels reach 600 TFLOP/s with BF16 weights (in_proj), so decoding bounds them (H200, 2026-11).
#include "ggml-like/cuda/linear/gemm.cuh"
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"
#include "ggml-like/cuda/moe/expert_shapes.h"
#include "ggml-like/cuda/moe/gemm_experts.h"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// An upper bound of the tiles of `size` rows: the sum of ceil(pairs of expert e / size).
int64_t most_tiles(int64_t pairs, int experts, int size) {
    const int64_t owners = pairs < experts ? pairs : experts;
    return (pairs + owners * (size - 1)) / size;
}

template <Kind K>
void run_warpgroups(Context& context, const char* what, const GemmTask& task, bool handful) {
    const int64_t pairs = static_cast<int64_t>(task.tokens) * task.used;
    if (handful)
        launch_warpgroups<K, Handful<K>>(context, what, task, most_tiles(pairs, task.experts, 16));
    else
        launch_warpgroups<K, Tall<K>>(context, what, task, most_tiles(pairs, task.experts, 96));
}

void run_experts(Context& context, const PackedExperts& w, GemmTask task) {
    const int64_t pairs = static_cast<int64_t>(task.tokens) * task.used;
    task.data = w.data;
    task.factor = w.factor;
    task.tiles = w.tiles;
    task.chunks = w.chunks;
    task.cols = w.cols;
    task.expert_bytes = w.expert_bytes;
    task.experts = w.count;
    const ExpertsProduct product = choose(context, ExpertsShape{w.kind, pairs, w.count});
    const char* what = name_of(product);
    const bool handful = product == ExpertsProduct::handful;
    if (product == ExpertsProduct::few)
        launch_gemm<Few>(context, w.kind, what, task, most_tiles(pairs, w.count, Few::kTokens));
    else if (product == ExpertsProduct::many)
        launch_gemm<Many>(context, w.kind, what, task, most_tiles(pairs, w.count, Many::kTokens));
    else if (w.kind == Kind::bf16)
        run_warpgroups<Kind::bf16>(context, what, task, handful);
    else
        run_warpgroups<Kind::nvfp4>(context, what, task, handful);
}

}  // namespace

void gemm_gate_up(Context& context, const PackedExperts& w, const void* h, const RowScale& scale,
                  const int* groups, int tokens, int used, void* routed) {
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
    run_experts(context, w, task);
}

void gemm_down(Context& context, const PackedExperts& w, const void* routed, const int* groups, int tokens,
               int used, void* terms) {
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
    run_experts(context, w, task);
}

}  // namespace quern::cuda::moe
