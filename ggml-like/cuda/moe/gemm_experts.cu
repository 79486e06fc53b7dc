// Grouped products of the chosen experts (gemm_experts.h). linear/gemm.cuh has the kernel: who owns which tile, traffic,
// limits.
//
//   grid: (expert, token tile) slow, row block of the expert fast, so that blocks side by side share
//   activations; the block finds its expert from the offsets in device memory. The grid is sized for the
//   worst spread of tokens: blocks beyond the last tile leave at once.
#include "ggml-like/cuda/linear/gemm.cuh"
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"
#include "ggml-like/cuda/moe/expert_shapes.h"
#include "ggml-like/cuda/moe/gemm_experts.h"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// sum of ceil(n_e / size) can be no more than this.
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
