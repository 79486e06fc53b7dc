// BF16 products of an answer step of many rows on sm_90a (gemm_warpgroups.cuh has the kernel): step_product.h's sums, whose
// parts are products of warpgroups.
//   whole    a block makes all parts of the sums: many rows of the matrix
//   quarter  a cluster of four blocks, each a four of the parts
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

// 32 rows of x: with 64 a thread would hold too many sums.
using Whole = WarpgroupShape<32, 1, 2, 1, kAnswerSplits, false>;
using Quarter = WarpgroupShape<32, 1, 2, kAnswerFours, kAnswerSplits, false>;

}  // namespace

bool gemm_answer(Context& c, const Part& part, const Packed& w, const StepRows& x, const StepOutput& out) {
    if (w.chunks % kAnswerSplits != 0) return false;
    if (!warpgroups_fit<Kind::bf16, Whole>(c) || !warpgroups_fit<Kind::bf16, Quarter>(c)) return false;
    GemmTask task{};
    task.data = part.data;
    task.factor = part.factor;
    task.tiles = part.tiles;
    task.chunks = w.chunks;
    task.cols = w.cols;
    task.rows = part.rows;
    task.x = x.x;
    task.ldx8 = static_cast<int>(x.ld / 8);
    task.tokens = x.rows;
    task.answer = out;
    const int row_tiles = (x.rows + Whole::kTokens - 1) / Whole::kTokens;
    if (part.tiles <= 2 * c.sms)
        launch_warpgroups<Kind::bf16, Quarter>(c, "gemm_answer", task, row_tiles);
    else
        launch_warpgroups<Kind::bf16, Whole>(c, "gemm_answer", task, row_tiles);
    return true;
}

}  // namespace quern::cuda::linear
