// norm_linear on the GPU: products of h, whose sums get the row's factor (cuda/linear/epilogue.cuh).
//   answers: cuda/linear/dense_one.cuh, norm_rows.h, step_product.h: the same bits a row (the choice: cuda/variants.h)
//   prompts: the tiled product of cuda/linear/gemm.h
#include "ggml-like/ops/norm_linear.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_one.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/norm_rows.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// y[0][row] = sum * factor of the row, BF16 or F32.
struct StoreScaled {
    static constexpr bool kPaired = false;
    struct Loaded {};
    void* y;
    bool f32;
    const float* factor;

    __device__ __forceinline__ void early(Loaded&, int, int) const {}
    __device__ __forceinline__ void load(Loaded&, int, int) const {}
    __device__ __forceinline__ void store(int row, int, const Loaded&, float sum) const {
        const float v = scaled(sum, *factor);
        if (f32)
            static_cast<float*>(y)[row] = v;
        else
            static_cast<bf16*>(y)[row] = __float2bfloat16(v);
    }
};

/// What a launch of one row reads and writes.
struct Row {
    RowOfX h;
    RowScale scale;
    void* y;  // at the part's first row
    bool f32;

    __device__ __forceinline__ StoreScaled store(const float* factor) const { return {y, f32, factor}; }
};

/// Registers of a kernel of one row: one of NVFP4 with more is 2 % of a step slower (63 instead of 56), as
/// fewer blocks of its neighbours fit beside it.
template <Kind K, Extent E>
constexpr int kOneRegisters = (K == Kind::nvfp4 && E == Extent::few) ? 56 : 64;

template <Kind K, Extent E>
__global__ void __maxnreg__((kOneRegisters<K, E>))
    norm_linear_one(Part part, OneShape<K, true, E, one_holds(K, true, false)> shape, Row row) {
    __shared__ float factor[8];
    dense_one<true>(part, shape, ScaledRow<K>{SingleRow<K>(row.h), row.scale, factor}, row.store(factor));
}

template <Kind K, Extent E>
void one(Context& c, const Packed& w, const Part& part, const Row& row) {
    const OneLaunch one(c, K, part.tiles, w.chunks);
    launch(c, E == Extent::few ? "norm_linear one" : "norm_linear tall", norm_linear_one<K, E>, one.grid,
           kThreads, one.bytes(K, true, E), part, OneShape<K, true, E, one_holds(K, true, false)>(one), row);
}

template <Kind K>
void one(Context& c, AnswerProduct product, const Packed& w, const Part& part, const Row& row) {
    product == AnswerProduct::one ? one<K, Extent::few>(c, w, part, row)
                                  : one<K, Extent::many>(c, w, part, row);
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
        const AnswerProduct chosen = choose(
            c, {.kind = part.kind, .rows = rows, .tiles = part.tiles, .chunks = w.chunks, .normed = true});
        if (chosen == AnswerProduct::one || chosen == AnswerProduct::tall) {
            const Row row{{h.as<bf16>(), w.cols}, scale, to, f32};
            if (part.kind == Kind::bf16)
                one<Kind::bf16>(c, chosen, w, part, row);
            else if (part.kind == Kind::fp8)
                one<Kind::fp8>(c, chosen, w, part, row);
            else
                one<Kind::nvfp4>(c, chosen, w, part, row);
            continue;
        }
        const StepRows x{h.as<bf16>(), h.stride[0], rows};
        const StepOutput out{.y = to, .ld = y.stride[0], .f32 = f32, .scale = scale};
        if (takes_step_product(chosen))
            step_product(c, chosen, part, w, x, out);
        else
            norm_rows(c, "norm_linear few", part, w, x, out);
    }
}

}  // namespace quern::cuda
