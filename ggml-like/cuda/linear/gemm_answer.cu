// Products of an answer step of many rows on sm_90a (gemm_warpgroups.cuh has the kernel): step_product.h's
// sums, whose splits are products of warpgroups.
//   quarters  a cluster of four blocks, each four of the splits, which send each other their sums
//   low quarters  the same with half as many rows of the matrix: twice as many blocks where these were fewer than SMs
//   whole     a block makes all splits of a sum: where blocks are many
//   lone      the same with an SM for each block, whose ring is deeper: BF16
//   rounds    the same for up to 64 rows, by blocks that go from place to place: where these are many more than SMs
//
// Over ranks (low) quarters add up themselves (comm/tile_sums.cuh).
//
// NVFP4 and FP8: x is lifted where it lies in shared memory, and the scale of each 16 columns, or of a chunk, meets the sum of their
// products.
//
// Traffic: weights once for each 32 rows (rounds: 64), x once a place. Bound: latency of few steps (DeltaNet in_proj, 32 rows: 19 us,
// 12 of bytes); NVFP4 also instructions, half of them before and after the products; the head of 64 rows reads its weights twice, at the
// L2 cache's 5.5 TB/s (H200, 2026-11).
#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

template <Kind K>
void run(Context& c, AnswerProduct product, const GemmTask& task) {
    static_assert(Rounds<K>::kTokens >= kStepRows);
    if (product == AnswerProduct::rounds)
        launch_warpgroups<K, Rounds<K>>(c, "gemm_answer rounds", task);
    else if (product == AnswerProduct::whole)
        launch_warpgroups<K, Whole<K>>(c, "gemm_answer whole", task);
    else if (product == AnswerProduct::quarters)
        launch_warpgroups<K, Quarters<K>>(c, "gemm_answer quarters", task);
    else if (product == AnswerProduct::lone) {
        if constexpr (K == Kind::bf16) launch_warpgroups<K, Lone<K>>(c, "gemm_answer lone", task);
    } else if constexpr (K != Kind::fp8)
        launch_warpgroups<K, LowQuarters<K>>(c, "gemm_answer low quarters", task);
}

template <Kind K>
void run(Context& c, AnswerProduct product, const RankTask& task) {
    if (product == AnswerProduct::quarters)
        launch_warpgroups<K, OverRanks<Quarters<K>>>(c, "gemm_answer quarters of ranks", task);
    else
        launch_warpgroups<K, OverRanks<LowQuarters<K>>>(c, "gemm_answer low quarters of ranks", task);
}

}  // namespace

void gemm_answer(Context& c, AnswerProduct product, const Part& part, const Packed& w, const StepRows& x,
                 const StepOutput& out, const comm::Peers* peers) {
    GemmTask task = part_task(w, part, x.x, x.ld, x.rows);
    task.answer = out;
    if (peers != nullptr) {
        const RankTask over_ranks{task, *peers};
        part.kind == Kind::bf16 ? run<Kind::bf16>(c, product, over_ranks)
                                : run<Kind::nvfp4>(c, product, over_ranks);
        return;
    }
    if (part.kind == Kind::bf16) return run<Kind::bf16>(c, product, task);
    if (part.kind == Kind::fp8) return run<Kind::fp8>(c, product, task);
    run<Kind::nvfp4>(c, product, task);
}

}  // namespace quern::cuda::linear
