// Dense and paired products (gemm.h). gemm.cuh has the kernel: who owns which tile, traffic, limits.
//
//   few     32 rows x  32 tokens, 4 warps along K: weights stream once, many small blocks
//   middle 128 rows x  64 tokens, 4 warps along M
//   many   256 rows x 128 tokens, 8 warps along M: the least traffic per product
//
// On sm_90a (gemm_warpgroups.cuh) all shapes have 128 rows:
//   wide   256 tokens, one block an SM
//   tall    96 tokens, two blocks an SM
//   split   64 tokens, up to 8 blocks of a cluster share the columns: few rows, or few tokens
#include "ggml-like/cuda/gemm_warpgroups.cuh"

namespace quern::cuda {
namespace {

using Few = GemmShape<2, 32, 2, 4, 2, false>;
using Middle = GemmShape<8, 64, 2, 1, 2, false>;
using Many = GemmShape<16, 128, 2, 1, 1, false>;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

using Wide = WarpgroupShape<256, 1, 1, 1, false>;
using Tall = WarpgroupShape<96, 1, 2, 1, false>;
template <Kind K, int kSplit>
using Split = WarpgroupShape<64, K == Kind::nvfp4 ? 2 : 1, 2, kSplit, false>;

template <class S>
int64_t blocks(const GemmTask& task) {
    return ceil_div(task.tiles, S::kTiles) * ceil_div(task.tokens, S::kTokens);
}

/// The largest shape whose blocks fill the GPU.
template <Kind K>
bool run_warpgroups(Context& context, const char* what, const GemmTask& task) {
    if (task.tokens > 128 && 10 * blocks<Wide>(task) >= 9 * context.sms)
        return launch_warpgroups<K, Wide>(context, what, task, ceil_div(task.tokens, Wide::kTokens));
    if (task.tokens > 64 && 10 * blocks<Tall>(task) >= 9 * context.sms)
        return launch_warpgroups<K, Tall>(context, what, task, ceil_div(task.tokens, Tall::kTokens));
    const int64_t tiles = ceil_div(task.tokens, 64);
    const int64_t room = 2 * context.sms / blocks<Split<K, 1>>(task);  // blocks that may share a tile
    if (room >= 8 && task.chunks >= 16) return launch_warpgroups<K, Split<K, 8>>(context, what, task, tiles);
    if (room >= 2 && task.chunks >= 4) return launch_warpgroups<K, Split<K, 2>>(context, what, task, tiles);
    return launch_warpgroups<K, Split<K, 1>>(context, what, task, tiles);
}

/// A shape whose blocks fill the GPU, the largest first.
void run_part(Context& context, const char* what, Kind kind, const GemmTask& task) {
    if (kind == Kind::bf16 && run_warpgroups<Kind::bf16>(context, what, task)) return;
    if (kind == Kind::nvfp4 && run_warpgroups<Kind::nvfp4>(context, what, task)) return;
    if (10 * blocks<Many>(task) >= 9 * context.sms && task.tokens > 64)
        launch_gemm<Many>(context, kind, what, task, ceil_div(task.tokens, Many::kTokens));
    else if (task.tokens > 64 || (task.tokens > 32 && 2 * blocks<Middle>(task) >= context.sms))
        launch_gemm<Middle>(context, kind, what, task, ceil_div(task.tokens, Middle::kTokens));
    else
        launch_gemm<Few>(context, kind, what, task, ceil_div(task.tokens, Few::kTokens));
}

GemmTask part_task(const Packed& w, const Part& part, const void* x, int64_t ldx, int tokens) {
    GemmTask task{};
    task.data = part.data;
    task.factor = part.factor;
    task.tiles = part.tiles;
    task.chunks = w.chunks;
    task.cols = w.cols;
    task.rows = part.rows;
    task.x = static_cast<const bf16*>(x);
    task.ldx8 = static_cast<int>(ldx / 8);
    task.tokens = tokens;
    return task;
}

}  // namespace

void gemm(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens, const GemmOutput& out) {
    for (int i = 0; i < w.parts; ++i) {
        GemmTask task = part_task(w, w.part[i], x, ldx, tokens);
        const int64_t at = w.part[i].row_begin;
        task.f32 = out.f32;
        task.y = static_cast<uint8_t*>(out.y) + at * (out.f32 ? 4 : 2);
        task.ldy = out.ld;
        task.residual = out.residual == nullptr ? nullptr : out.residual + at;
        task.residual_ld = out.residual_ld;
        run_part(context, "gemm", w.part[i].kind, task);
    }
}

void gemm_paired(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens, void* y,
                 int64_t ldy) {
    for (int i = 0; i < w.parts; ++i) {
        GemmTask task = part_task(w, w.part[i], x, ldx, tokens);
        task.paired = true;
        task.rows = w.part[i].rows / 2;
        task.y = static_cast<bf16*>(y) + w.part[i].row_begin / 2;
        task.ldy = ldy;
        run_part(context, "gemm_paired", w.part[i].kind, task);
    }
}

}  // namespace quern::cuda
