// Products of chosen experts with rows of prompts, grouped by expert (gemm_experts.h). Who owns which tile, shared memory,
// limits: expert_tour.cuh; without warpgroups linear/gemm.cuh.
//
//   grid of the latter: (expert, tile of rows) slow, tile of the expert's matrix fast, so that neighbouring blocks read
//   the same activations. A block finds its expert from the groups in device memory. The grid is sized for the worst spread
//   of rows over experts; blocks beyond the last tile leave at once.
#include "ggml-like/cuda/linear/gemm_tiles.h"
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"
#include "ggml-like/cuda/moe/expert_shapes.h"
#include "ggml-like/cuda/moe/expert_tour.cuh"
#include "ggml-like/cuda/moe/gemm_experts.h"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

template <Kind K>
void run_tour(Context& context, const char* what, GemmTask task) {
    using S = Tour<K>;
    if (task.cols % 8 != 0) unsupported(what, "a width that is not a multiple of 8");
    const int64_t rows = int64_t{task.tokens} * (task.used + 1);  // of y, at most
    if (rows * max(task.ldy, task.shared.ldy) >= int64_t{1} << 32)
        unsupported(what, "results of 2^32 elements or more");
    task.box_tiles = S::kTiles;
    task.row_blocks = (task.tiles + S::kTiles - 1) / S::kTiles;
    task.counter = context.counters + (task.down ? 1 : 0);  // both may be under way
    const int64_t along = (task.shared.tokens + S::kTokens - 1) / S::kTokens,
                  places = task.row_blocks * (along + token_tiles(task, S::kTokens));
    GemmTask of_shared = task;
    if (along > 0) of_shared.data = task.shared.data, of_shared.experts = 1;
    const dim3 grid(static_cast<unsigned>(min(places, int64_t{context.sms})));
    GemmTask pairs = task;  // x has a row for each pair
    pairs.tokens = task.tokens * task.used, pairs.box_tokens = of_shared.box_tokens = S::kBoxTokens;
    if (along > 0) of_shared.x = task.shared.x;
    launch(context, what, expert_tour<K>, grid, dim3(S::kThreads), S::kShared, task, weight_map<K, S>(task),
           weight_map<K, S>(of_shared), token_map(pairs), token_map(of_shared));
}

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
        run_tour<Kind::bf16>(context, what, task);
    else
        run_tour<Kind::nvfp4>(context, what, task);
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
