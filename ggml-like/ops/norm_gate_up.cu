// norm_gate_up on the GPU. A tile of 16 packed rows holds 8 rows of gate and the same 8 of up.
//   answers: cuda/linear/dense_one.cuh, norm_rows.h, step_product.h: the same bits a row (the choice: cuda/variants.h)
//   prompts: the paired tiled product of cuda/linear/gemm.h
#include "ggml-like/ops/norm_gate_up.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_one.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/norm_rows.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

struct StoreGated {
    static constexpr bool kPaired = true;
    struct Loaded {};
    bf16* y;  // of one row
    const float* factor;

    __device__ __forceinline__ void store(int row, int, float gate, float up) const {
        y[row] = gated(scaled(gate, *factor), scaled(up, *factor));
    }
};

template <Kind K>
__global__ void __maxnreg__(64) norm_gate_up_one(Part part, OneShape<K, true, Extent::many, false> shape,
                                                 RowOfX row, RowScale scale, bf16* y) {
    __shared__ float factor[8];
    dense_one<false>(part, shape, ScaledRow<K>{SingleRow<K>(row), scale, factor}, StoreGated{y, factor});
}

template <Kind K>
void one(Context& c, const Packed& w, const Tensor& h, const RowScale& scale, const Tensor& y) {
    const Part& part = w.part[0];  // paired order has one
    const OneLaunch one(c, K, part.tiles, w.chunks);
    launch(c, "norm_gate_up tall", norm_gate_up_one<K>, one.grid, kThreads, one.bytes(K, true, Extent::many),
           part, OneShape<K, true, Extent::many, false>(one), RowOfX{h.as<bf16>(), w.cols}, scale,
           y.as<bf16>());
}

}  // namespace

void norm_gate_up(const Node& node, Context& c) {
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1], &y = *node.outputs[0];
    const auto& p = node.params<NormGateUpParams>();
    const Packed& w = *static_cast<const Packed*>(p.weight->placed);
    const int rows = static_cast<int>(h.shape[0]);
    const RowScale scale = scale_of(h, squares, p.eps);
    if (p.kind == StepKind::prompt)
        return gemm_paired(c, w, h.data, h.stride[0], rows, {y.as<bf16>(), y.stride[0], scale});
    const Kind kind = w.part[0].kind;
    const AnswerProduct chosen = choose(c, AnswerShape{.kind = kind,
                                                       .rows = rows,
                                                       .tiles = w.part[0].tiles,
                                                       .chunks = w.chunks,
                                                       .normed = true,
                                                       .paired = true});
    if (chosen == AnswerProduct::tall) {
        if (kind == Kind::bf16) return one<Kind::bf16>(c, w, h, scale, y);
        if (kind == Kind::fp8) return one<Kind::fp8>(c, w, h, scale, y);
        return one<Kind::nvfp4>(c, w, h, scale, y);
    }
    const StepRows x{h.as<bf16>(), h.stride[0], rows};
    const StepOutput out{.y = y.data, .ld = y.stride[0], .paired = true, .scale = scale};
    if (takes_step_product(chosen)) return step_product(c, chosen, w.part[0], w, x, out);
    norm_rows(c, "norm_gate_up few", w.part[0], w, x, out);
}

}  // namespace quern::cuda
