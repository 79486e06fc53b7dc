// norm_linear on the GPU: products of h, whose sums get the row's factor (cuda/linear/epilogue.cuh).
//   answers: cuda/linear/dense_one.cuh, dense_rows.cuh, step_product.h: the same bits a row (the choice: cuda/variants.h)
//   prompts: the tiled product of cuda/linear/gemm.h
#include "ggml-like/ops/norm_linear.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_one.cuh"
#include "ggml-like/cuda/linear/dense_rows.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/step_product.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// y[n][row] = sum * factor of row n, BF16 or F32.
struct StoreScaled {
    static constexpr bool kPaired = false;
    using Loaded = float;
    void* y;
    int64_t ld;
    bool f32;
    const float* factor;

    __device__ __forceinline__ float load(int, int) const { return 0; }
    __device__ __forceinline__ void store(int row, int n, float, float sum) const {
        const float v = scaled(sum, factor[n]);
        if (f32)
            static_cast<float*>(y)[n * ld + row] = v;
        else
            static_cast<bf16*>(y)[n * ld + row] = __float2bfloat16(v);
    }
};

/// What a launch of up to 8 rows reads and writes.
struct Rows {
    const bf16* h;
    int64_t ld;
    int columns, rows;
    RowScale scale;
    void* y;  // at the part's first row
    int64_t y_ld;
    bool f32;

    template <Kind K, int kTogether = 8>
    __device__ __forceinline__ ScaledRows<K, kTogether> prologue(float* factor) const {
        return {{h, ld, columns, rows}, scale, factor};
    }
    __device__ __forceinline__ StoreScaled store(const float* factor) const { return {y, y_ld, f32, factor}; }
};

template <Kind K, bool kDeep>
__global__ void __launch_bounds__(kThreads, 2) norm_linear_few(Part part, DenseLaunch dense, Rows rows) {
    __shared__ float factor[8];
    dense_rows<K, kDeep>(part, dense, rows.prologue<K>(factor), rows.store(factor));
}

/// Registers of a kernel of one row: one of NVFP4 with more is 2 % of a step slower (63 instead of 56), as
/// fewer blocks of its neighbours fit beside it.
template <Kind K, Extent E>
constexpr int kOneRegisters = (K == Kind::nvfp4 && E == Extent::few) ? 56 : 64;

template <Kind K, Extent E>
__global__ void __maxnreg__((kOneRegisters<K, E>))
    norm_linear_one(Part part, OneShape<K, true, E, one_holds(K, true, false)> shape, Rows rows) {
    __shared__ float factor[8];
    dense_one<true>(part, shape, rows.prologue<K, 1>(factor), rows.store(factor));
}

template <Kind K, Extent E>
void one(Context& c, const Packed& w, const Part& part, const Rows& rows) {
    const OneLaunch one(c, K, part.tiles, w.chunks);
    launch(c, E == Extent::few ? "norm_linear one" : "norm_linear tall", norm_linear_one<K, E>, one.grid,
           kThreads, one.bytes(K, true, E), part, OneShape<K, true, E, one_holds(K, true, false)>(one), rows);
}

template <Kind K>
void few(Context& c, const Packed& w, const Part& part, const Rows& rows) {
    const bool deep = dense_is_deep(c, K, rows.rows, w.chunks, 0);
    launch(c, deep ? "norm_linear few" : "norm_linear few shallow",
           deep ? norm_linear_few<K, true> : norm_linear_few<K, false>,
           min(c.sms, dense_groups(K, part.tiles, w.chunks)), kThreads,
           dense_shared_bytes(K, deep, rows.rows, w.chunks), part, DenseLaunch{w.chunks, rows.rows}, rows);
}

template <Kind K>
void product(Context& c, AnswerProduct product, const Packed& w, const Part& part, const Rows& rows) {
    if (product == AnswerProduct::one) return one<K, Extent::few>(c, w, part, rows);
    if (product == AnswerProduct::tall) return one<K, Extent::many>(c, w, part, rows);
    few<K>(c, w, part, rows);
}

}  // namespace

void norm_linear(const Node& node, Context& c) {
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1], &y = *node.outputs[0];
    const auto& p = node.params<NormLinearParams>();
    const Packed& w = *static_cast<const Packed*>(p.weight->placed);
    const int rows = static_cast<int>(h.shape[0]);
    const bool f32 = y.dtype == DType::F32;
    const RowScale scale = scale_of(h, squares, p.eps);
    if (p.kind == StepKind::prompt)
        return gemm(c, w, h.data, h.stride[0], rows,
                    {.y = y.data, .ld = y.stride[0], .f32 = f32, .scale = scale}, Split::by_matrix);
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        auto* to = static_cast<uint8_t*>(y.data) + part.row_begin * (f32 ? 4 : 2);
        const Rows few_rows{h.as<bf16>(), h.stride[0], w.cols, rows, scale, to, y.stride[0], f32};
        const AnswerProduct chosen = choose(
            c, {.kind = part.kind, .rows = rows, .tiles = part.tiles, .chunks = w.chunks, .normed = true});
        if (takes_step_product(chosen))
            step_product(c, chosen, part, w, {h.as<bf16>(), h.stride[0], rows},
                         {.y = to, .ld = y.stride[0], .f32 = f32, .scale = scale});
        else if (part.kind == Kind::bf16)
            product<Kind::bf16>(c, chosen, w, part, few_rows);
        else if (part.kind == Kind::fp8)
            product<Kind::fp8>(c, chosen, w, part, few_rows);
        else
            product<Kind::nvfp4>(c, chosen, w, part, few_rows);
    }
}

}  // namespace quern::cuda
