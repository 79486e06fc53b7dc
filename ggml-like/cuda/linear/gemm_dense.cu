// Dense and paired products (gemm.h). gemm.cuh has the kernel: who owns which tile, traffic, limits.
//
//   middle 128 rows x  64 tokens, 4 warps along M
//   many   256 rows x 128 tokens, 8 warps along M: the least traffic per product
//   of a split matrix, 4 warps along K:
//     few    32 rows x  32 tokens: weights stream once, many small blocks
//     narrow 64 rows x  64 tokens
//
// On sm_90a (gemm_warpgroups.cuh) all shapes have 128 rows, for all but FP8:
//   wide   256 tokens, one block an SM
//   tall    96 tokens, two blocks an SM
//   short   64 tokens, two blocks an SM
//   of a split matrix:
//     halves  96 tokens, a block for each half of the columns
//     low     64 tokens, the same
#include "ggml-like/cuda/linear/gemm.cuh"
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

using Few = GemmShape<2, 32, 2, 4, 2, false>;
using Narrow = GemmShape<4, 64, 2, 4, 1, false>;
using Middle = GemmShape<8, 64, 2, 1, 2, false>;
using Many = GemmShape<16, 128, 2, 1, 1, false>;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

using Wide = WarpgroupShape<256, 1, 1, 1, 1, false>;
using Tall = WarpgroupShape<96, 1, 2, 1, 1, false>;
template <Kind K>
using Short = WarpgroupShape<64, K == Kind::nvfp4 ? 2 : 1, 2, 1, 1, false>;
using Halves = WarpgroupShape<96, 1, 2, kPromptSplits, 1, false>;
template <Kind K>
using Low = WarpgroupShape<64, K == Kind::nvfp4 ? 2 : 1, 2, kPromptSplits, 1, false>;

template <class S>
int64_t blocks(const GemmTask& task) {
    return ceil_div(task.tiles, S::kTiles) * ceil_div(task.tokens, S::kTokens);
}

/// Of few rows and many columns: too few blocks would share the weights of a short prompt.
bool is_split(const GemmTask& task, Split split) {
    return split == Split::by_matrix && task.tiles <= 256 && task.chunks >= 16;
}

/// The largest shape whose blocks fill the GPU.
template <Kind K>
bool run_warpgroups(Context& context, const char* what, const GemmTask& task, bool split) {
    if (!warpgroups_fit<K, Wide>(context)) return false;  // all shapes do, or none: the same bits
    const auto tokens = [&](int each) { return ceil_div(task.tokens, each); };
    if (split && task.tokens > 64 && kPromptSplits * blocks<Halves>(task) >= context.sms)
        launch_warpgroups<K, Halves>(context, what, task, tokens(96));
    else if (split)
        launch_warpgroups<K, Low<K>>(context, what, task, tokens(64));
    else if (task.tokens > 128 && 10 * blocks<Wide>(task) >= 9 * context.sms)
        launch_warpgroups<K, Wide>(context, what, task, tokens(256));
    else if (task.tokens > 64 && 10 * blocks<Tall>(task) >= 9 * context.sms)
        launch_warpgroups<K, Tall>(context, what, task, tokens(96));
    else
        launch_warpgroups<K, Short<K>>(context, what, task, tokens(64));
    return true;
}

/// A shape whose blocks fill the GPU, the largest first.
void run_part(Context& context, const char* what, Kind kind, const GemmTask& task, Split wanted) {
    const bool split = is_split(task, wanted);
    if (kind == Kind::bf16 && run_warpgroups<Kind::bf16>(context, what, task, split)) return;
    if (kind == Kind::nvfp4 && run_warpgroups<Kind::nvfp4>(context, what, task, split)) return;
    if (split && task.tokens > 64)
        launch_gemm<Narrow>(context, kind, what, task, ceil_div(task.tokens, Narrow::kTokens));
    else if (split)
        launch_gemm<Few>(context, kind, what, task, ceil_div(task.tokens, Few::kTokens));
    else if (10 * blocks<Many>(task) >= 9 * context.sms && task.tokens > 64)
        launch_gemm<Many>(context, kind, what, task, ceil_div(task.tokens, Many::kTokens));
    else
        launch_gemm<Middle>(context, kind, what, task, ceil_div(task.tokens, Middle::kTokens));
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

void gemm(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens, const GemmOutput& out,
          Split split) {
    for (int i = 0; i < w.parts; ++i) {
        GemmTask task = part_task(w, w.part[i], x, ldx, tokens);
        const int64_t at = w.part[i].row_begin;
        task.f32 = out.f32;
        task.y = static_cast<uint8_t*>(out.y) + at * (out.f32 ? 4 : 2);
        task.ldy = out.ld;
        task.residual = out.residual == nullptr ? nullptr : out.residual + at;
        task.residual_ld = out.residual_ld;
        task.scale = out.scale;
        run_part(context, "gemm", w.part[i].kind, task, split);
    }
}

void gemm_paired(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens,
                 const GatedOutput& out) {
    for (int i = 0; i < w.parts; ++i) {
        GemmTask task = part_task(w, w.part[i], x, ldx, tokens);
        task.paired = true;
        task.rows = w.part[i].rows / 2;
        task.y = out.y + w.part[i].row_begin / 2;
        task.ldy = out.ld;
        task.scale = out.scale;
        run_part(context, "gemm_paired", w.part[i].kind, task, Split::never);
    }
}

}  // namespace quern::cuda::linear
