// draft_token on the GPU. One row of a head in NVFP4 with many tiles, as one sequence drafts from: a product that keeps the best
// column instead of logits, with the sums of norm_linear (cuda/linear/dense_one.cuh). Else the kernels of the two ops.
#include "ggml-like/ops/draft_token.h"

#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/best_column.cuh"
#include "ggml-like/cuda/linear/dense_one.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// A thread's best column so far.
struct KeepBest {
    static constexpr bool kPaired = false;
    struct Loaded {};
    const BestColumns& columns;
    const float* factor;
    unsigned long long& best;

    __device__ __forceinline__ void early(Loaded&, int, int) const {
        bring_near(columns.ids);  // once weights have been asked for
    }
    __device__ __forceinline__ void load(Loaded&, int, int) const {}
    __device__ __forceinline__ void store(int row, int, const Loaded&, float sum) const {
        best = max(best, columns.key(scaled(sum, *factor), row));
    }
};

using Shape = OneShape<Kind::nvfp4, true, Extent::many, one_holds(Kind::nvfp4, true, false)>;

__global__ void __maxnreg__(64)
    draft_token_one(Part part, Shape shape, RowOfX row, RowScale scale, BestColumns columns) {
    __shared__ float factor[8];
    unsigned long long best = 0;
    dense_one<true>(part, shape, ScaledRow<Kind::nvfp4>{SingleRow<Kind::nvfp4>(row), scale, factor},
                    KeepBest{columns, factor, best});
    columns.choose<kWarps>(0, static_cast<int>(gridDim.x), best);
}

/// Whether that kernel takes the head.
bool takes_one(const Context& c, const Packed& w, int rows) {
    if (w.parts != 1 || w.part[0].kind != Kind::nvfp4 || c.sms > kBestBlocks) return false;
    const AnswerShape shape{
        .kind = Kind::nvfp4, .rows = rows, .tiles = w.part[0].tiles, .chunks = w.chunks, .normed = true};
    return choose(c, shape) == AnswerProduct::tall;
}

}  // namespace

void draft_token(const Node& node, Context& c) {
    const auto& p = node.params<DraftTokenParams>();
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1];
    const Packed& w = *static_cast<const Packed*>(p.product.weight->placed);
    if (p.product.kind == StepKind::prompt || !takes_one(c, w, static_cast<int>(h.shape[0]))) {
        const DraftTokenNodes nodes(node);
        norm_linear(nodes.product, c);
        return best_token(nodes.best, c);
    }
    const Part& part = w.part[0];
    const OneLaunch one(c, Kind::nvfp4, part.tiles, w.chunks);
    launch(c, "draft_token one", draft_token_one, one.grid, kThreads,
           one.bytes(Kind::nvfp4, true, Extent::many), part, Shape(one), RowOfX{h.as<const bf16>(), w.cols},
           scale_of(h, squares, p.product.eps),
           best_columns(p.columns, *node.outputs[0], *node.outputs[2], c));
}

}  // namespace quern::cuda
