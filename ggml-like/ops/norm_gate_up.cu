// norm_gate_up on the GPU. A tile of 16 packed rows holds 8 rows of gate and the same 8 of up.
//   answers: cuda/linear/dense_rows.cuh, step_product.h: the same bits a row (the choice: cuda/variants.h)
//   prompts: the paired tiled product of cuda/linear/gemm.h
#include "ggml-like/ops/norm_gate_up.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_one.cuh"
#include "ggml-like/cuda/linear/dense_rows.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/step_product.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

struct StoreGated {
    static constexpr bool kPaired = true;
    using Loaded = float;
    bf16* y;
    int64_t ld;
    const float* factor;

    __device__ __forceinline__ void store(int row, int n, float gate, float up) const {
        y[n * ld + row] = gated(scaled(gate, factor[n]), scaled(up, factor[n]));
    }
};

template <Kind K, bool kDeep>
__global__ void __launch_bounds__(kThreads, 2)
    norm_gate_up_few(Part part, DenseLaunch dense, PlainRows<K> rows, RowScale scale, bf16* y, int64_t ld) {
    __shared__ float factor[8];
    dense_rows<K, kDeep>(part, dense, ScaledRows<K, 8>{rows, scale, factor}, StoreGated{y, ld, factor});
}

template <Kind K>
__global__ void __maxnreg__(64) norm_gate_up_one(Part part, OneShape<K, true, Extent::many, false> shape,
                                                 PlainRows<K, 1> row, RowScale scale, bf16* y) {
    __shared__ float factor[8];
    dense_one<false>(part, shape, ScaledRows<K, 1>{row, scale, factor}, StoreGated{y, 0, factor});
}

template <Kind K>
void one(Context& c, const Packed& w, const Tensor& h, const RowScale& scale, const Tensor& y) {
    const Part& part = w.part[0];
    const OneLaunch one(c, K, part.tiles, w.chunks);
    launch(c, "norm_gate_up tall", norm_gate_up_one<K>, one.grid, kThreads, one.bytes(K, true, Extent::many),
           part, OneShape<K, true, Extent::many, false>(one), PlainRows<K, 1>{h.as<bf16>(), 0, w.cols, 1},
           scale, y.as<bf16>());
}

template <Kind K>
void few(Context& c, const Packed& w, const Tensor& h, const RowScale& scale, const Tensor& y) {
    const Part& part = w.part[0];  // paired order has one
    const int rows = static_cast<int>(h.shape[0]);
    const bool deep = dense_is_deep(c, K, rows, w.chunks, 0);
    launch(c, deep ? "norm_gate_up few" : "norm_gate_up few shallow",
           deep ? norm_gate_up_few<K, true> : norm_gate_up_few<K, false>,
           min(c.sms, dense_groups(K, part.tiles, w.chunks)), kThreads,
           dense_shared_bytes(K, deep, rows, w.chunks), part, DenseLaunch{w.chunks, rows},
           PlainRows<K>{h.as<bf16>(), h.stride[0], w.cols, rows}, scale, y.as<bf16>(), y.stride[0]);
}

template <Kind K>
void product(Context& c, AnswerProduct chosen, const Packed& w, const Tensor& h, const RowScale& scale,
             const Tensor& y) {
    chosen == AnswerProduct::tall ? one<K>(c, w, h, scale, y) : few<K>(c, w, h, scale, y);
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
    if (takes_step_product(chosen))
        return step_product(c, chosen, w.part[0], w, {h.as<bf16>(), h.stride[0], rows},
                            {.y = y.data, .ld = y.stride[0], .paired = true, .scale = scale});
    if (kind == Kind::bf16) return product<Kind::bf16>(c, chosen, w, h, scale, y);
    if (kind == Kind::fp8) return product<Kind::fp8>(c, chosen, w, h, scale, y);
    product<Kind::nvfp4>(c, chosen, w, h, scale, y);
}

}  // namespace quern::cuda
