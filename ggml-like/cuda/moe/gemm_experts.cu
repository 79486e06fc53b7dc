// Grouped products of the chosen experts (gemm_experts.h). linear/gemm.cuh has the kernel: who owns which tile, traffic,
// limits.
//
//   grid: (expert, token tile) slow, row block of the expert fast, so that blocks side by side share
//   activations; the block finds its expert from the offsets in device memory. The grid is sized for the
//   worst spread of tokens: blocks beyond the last tile leave at once.
#include "ggml-like/cuda/linear/gemm.cuh"
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"
#include "ggml-like/cuda/moe/gemm_experts.h"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

using Few = GemmShape<8, 32, 2, 1, 4, false>;
using Many = GemmShape<8, 128, 2, 1, 2, true>;

/// On sm_90a: 128 rows, as many blocks an SM as hide each other's first copies.
template <Kind K>
using Handful = WarpgroupShape<16, K == Kind::nvfp4 ? 4 : 1, 3, 1, 1, true>;
template <Kind K>
using Tall = WarpgroupShape<96, K == Kind::nvfp4 ? 2 : 1, 2, 1, 1, true>;

/// sum of ceil(n_e / size) can be no more than this.
int64_t most_tiles(int64_t pairs, int experts, int size) {
    const int64_t owners = pairs < experts ? pairs : experts;
    return (pairs + owners * (size - 1)) / size;
}

template <Kind K>
bool run_warpgroups(Context& context, const char* what, const GemmTask& task) {
    if (!warpgroups_fit<K, Tall<K>>(context)) return false;
    const int64_t pairs = static_cast<int64_t>(task.tokens) * task.used;
    if (pairs <= 8 * static_cast<int64_t>(task.experts))
        launch_warpgroups<K, Handful<K>>(context, what, task, most_tiles(pairs, task.experts, 16));
    else
        launch_warpgroups<K, Tall<K>>(context, what, task, most_tiles(pairs, task.experts, 96));
    return true;
}

void run_experts(Context& context, const char* what, const PackedExperts& w, GemmTask task) {
    const int64_t pairs = static_cast<int64_t>(task.tokens) * task.used;
    task.data = w.data;
    task.factor = w.factor;
    task.tiles = w.tiles;
    task.chunks = w.chunks;
    task.cols = w.cols;
    task.expert_bytes = w.expert_bytes;
    task.experts = w.count;
    if (w.kind == Kind::bf16 && run_warpgroups<Kind::bf16>(context, what, task)) return;
    if (w.kind == Kind::nvfp4 && run_warpgroups<Kind::nvfp4>(context, what, task)) return;
    if (pairs <= 20 * static_cast<int64_t>(w.count))
        launch_gemm<Few>(context, w.kind, what, task, most_tiles(pairs, w.count, Few::kTokens));
    else
        launch_gemm<Many>(context, w.kind, what, task, most_tiles(pairs, w.count, Many::kTokens));
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
    run_experts(context, "gemm_gate_up", w, task);
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
    run_experts(context, "gemm_down", w, task);
}

}  // namespace quern::cuda::moe
