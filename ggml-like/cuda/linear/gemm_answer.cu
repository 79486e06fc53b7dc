// BF16 products of an answer step of many rows on sm_90a (gemm_warpgroups.cuh has the kernel): step_product.h's sums, whose
// splits are products of warpgroups.
//   whole     a block makes all splits of a sum: many rows of the matrix
//   quarters  a cluster of four blocks, each four of the splits
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

void gemm_answer(Context& c, bool whole, const Part& part, const Packed& w, const StepRows& x,
                 const StepOutput& out) {
    GemmTask task = part_task(w, part, x.x, x.ld, x.rows);
    task.answer = out;
    const int row_tiles = (x.rows + Whole::kTokens - 1) / Whole::kTokens;
    if (whole)
        launch_warpgroups<Kind::bf16, Whole>(c, "gemm_answer whole", task, row_tiles);
    else
        launch_warpgroups<Kind::bf16, Quarters>(c, "gemm_answer quarters", task, row_tiles);
}

}  // namespace quern::cuda::linear
