// norm_linear on the GPU.
//   few rows (<= 16): every block normalises x for itself and streams its tiles of W (cuda/dense_rows.cuh);
//     one row of a matrix with few tiles a block: cuda/dense_one.cuh
//   up to 8 rows after a moe_down that left them half normed (cuda/left_norm.h): the same with rows as they
//     are, and the norm's factor after the sum
//   many rows: one kernel writes h, then the tiled product of cuda/gemm.h
#include "ggml-like/ops/norm_linear.h"

#include <utility>

#include "ggml-like/cuda/dense_one.cuh"
#include "ggml-like/cuda/dense_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/left_norm.cuh"
#include "ggml-like/cuda/norm_rows.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"

namespace quern::cuda {
namespace {

template <typename Y>
struct Store {
    static constexpr bool kPaired = false;
    using Loaded = float;
    Y* y;
    int64_t ld;

    __device__ __forceinline__ float load(int, int) const { return 0; }
    __device__ __forceinline__ void store(int row, int n, float, float sum) const {
        y[n * ld + row] = static_cast<Y>(sum);
    }
};

/// h as its maker left it, and the factors of its rows.
template <Kind K, int kTogether>
struct LeftRows {
    PlainRows<K, kTogether> rows;
    LeftNorm left;
    int first;  // row of `left`
    float* factor;
    float squares;  // of row `warp`

    __device__ __forceinline__ void early() const {}
    __device__ __forceinline__ void operator()(bf16* h, int stride) {
        const int warp = threadIdx.x / 32;
        if (warp < rows.rows) squares = load_squares(left, first + warp);
        rows(h, stride);
    }
    __device__ __forceinline__ void late() const {
        const int warp = threadIdx.x / 32;
        if (warp >= rows.rows) return;
        const float own = norm_factor(left, squares);
        if (threadIdx.x % 32 == 0) factor[warp] = own;
    }
};

struct StoreScaled {
    static constexpr bool kPaired = false;
    using Loaded = float;
    bf16* y;
    int64_t ld;
    const float* factor;

    __device__ __forceinline__ float load(int, int) const { return 0; }
    __device__ __forceinline__ void store(int row, int n, float, float sum) const {
        y[n * ld + row] = __float2bfloat16(sum * factor[n]);
    }
};

/// Rows that are left, for a kernel.
struct Left {
    const bf16* h;
    int64_t ld;
    int columns, rows, first;
    LeftNorm norm;

    template <Kind K, int kTogether>
    __device__ __forceinline__ LeftRows<K, kTogether> prologue(float* factor) const {
        return {{h, ld, columns, rows}, norm, first, factor, 0.0f};
    }
};

template <Kind K, bool kDeep, bool kOne>
__global__ void __launch_bounds__(kThreads, 2)
    left_linear_few(Part part, int chunks, Left left, bf16* y, int64_t ld) {
    __shared__ float factor[kLeftRows];
    constexpr int kTogether = kOne ? 1 : 8;
    dense_rows<K, 1, kDeep, kOne, kOne>(part, chunks, left.rows, left.prologue<K, kTogether>(factor),
                                        StoreScaled{y + part.row_begin, ld, factor});
}

/// Registers of a kernel of one row: one of NVFP4 with more is 2 % of a step slower (63 instead of 56), as
/// fewer blocks of its neighbours fit beside it.
template <Kind K, Extent E>
constexpr int kOneRegisters = (K == Kind::nvfp4 && E == Extent::few) ? 56 : 64;

template <Kind K>
__global__ void __maxnreg__((kOneRegisters<K, Extent::few>))
    left_linear_one(Part part, OneShape<K, true> shape, Left left, bf16* y) {
    __shared__ float factor[kLeftRows];
    dense_one(part, shape, left.prologue<K, 1>(factor), StoreScaled{y + part.row_begin, 0, factor});
}

template <Kind K>
void left_few(Context& c, const Packed& w, const Part& part, Left left, Tensor& y) {
    const int rows = left.rows;
    if (rows == 1 && dense_one_fits<K, true>(c, part, w.chunks)) {
        const OneShape<K, true> shape(c, part, w.chunks);
        return launch(c, "norm_linear", left_linear_one<K>, shape.grid, kThreads, shape.bytes(), part, shape,
                      left, y.as<bf16>());
    }
    const bf16* h = left.h;
    for (int first = 0; first < rows; first += left.rows) {
        left.rows = dense_rows_at_once<K>(c, rows - first, w.chunks);
        left.first = first, left.h = h + first * left.ld;
        dense_shape<K>(c, left.rows, w.chunks, [&]<int NT, bool kDeep>() {
            const auto run = [&]<bool kOne>() {
                launch(c, "norm_linear", left_linear_few<K, kDeep, kOne>,
                       min(c.sms, dense_groups<K>(part.tiles, w.chunks)), kThreads,
                       dense_shared_bytes<K, 1, kDeep, kOne>(left.rows, w.chunks), part, w.chunks, left,
                       y.as<bf16>() + first * y.stride[0], y.stride[0]);
            };
            left.rows == 1 ? run.template operator()<true>() : run.template operator()<false>();
        });
    }
}

void left_linear(Context& c, const Packed& w, const LeftNorm& norm, const Tensor& h, Tensor& y) {
    const Left left{h.as<bf16>(), h.stride[0], w.cols, static_cast<int>(h.shape[0]), 0, norm};
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        if (part.kind == Kind::bf16) left_few<Kind::bf16>(c, w, part, left, y);
        if (part.kind == Kind::fp8) left_few<Kind::fp8>(c, w, part, left, y);
        if (part.kind == Kind::nvfp4) left_few<Kind::nvfp4>(c, w, part, left, y);
    }
}

template <Kind K, int NT, bool kDeep, int kTogether, typename Y>
__global__ void __launch_bounds__(kThreads, 3 - NT)
    norm_linear_few(Part part, int chunks, NormRows<K, kTogether> prologue, Y* y, int64_t ld) {
    dense_rows<K, NT, kDeep, kTogether == 1, kTogether == 1>(part, chunks, prologue.rows, prologue,
                                                             Store<Y>{y + part.row_begin, ld});
}

template <Kind K, Extent E, typename Y>
__global__ void __maxnreg__((kOneRegisters<K, E>))
    norm_linear_one(Part part, OneShape<K, true, E> shape, NormRows<K, 1> prologue, Y* y) {
    dense_one(part, shape, prologue, Store<Y>{y + part.row_begin, 0});
}

/// False: it does not fit.
template <Kind K, Extent E, typename Y>
bool one(Context& c, const Packed& w, const Part& part, const float* x, const float* norm, float eps, Y* y) {
    if (!dense_one_fits<K, true, E>(c, part, w.chunks)) return false;
    const OneShape<K, true, E> shape(c, part, w.chunks);
    const NormRows<K, 1> prologue{x, norm, w.cols, 1, eps, 1.0f / w.cols, {}};
    launch(c, "norm_linear", norm_linear_one<K, E, Y>, shape.grid, kThreads, shape.bytes(), part, shape,
           prologue, y);
    return true;
}

template <Kind K, int NT, bool kDeep, int kTogether, typename Y>
void few(Context& c, const Packed& w, const Part& part, const float* x, const float* norm, int rows,
         float eps, Y* y, int64_t ld) {
    const NormRows<K, kTogether> prologue{x, norm, w.cols, rows, eps, 1.0f / w.cols, {}};
    launch(c, "norm_linear", norm_linear_few<K, NT, kDeep, kTogether, Y>,
           min(c.sms, dense_groups<K>(part.tiles, w.chunks)), kThreads,
           dense_shared_bytes<K, NT, kDeep, kTogether == 1>(rows, w.chunks), part, w.chunks, prologue, y, ld);
}

template <Kind K, typename Y>
void few(Context& c, const Packed& w, const Part& part, const float* x, const float* norm, int rows,
         float eps, Tensor& y) {
    if (rows == 1 && (one<K, Extent::few>(c, w, part, x, norm, eps, y.as<Y>()) ||
                      one<K, Extent::many>(c, w, part, x, norm, eps, y.as<Y>())))
        return;
    for (int first = 0, n = 0; first < rows; first += n) {
        n = dense_rows_at_once<K>(c, rows - first, w.chunks);
        const auto run = dense_shape<K>(c, n, w.chunks, [&]<int NT, bool kDeep>() {
            if constexpr (NT == 1)
                return n == 1 ? few<K, NT, kDeep, 1, Y> : few<K, NT, kDeep, 4, Y>;
            else
                return few<K, NT, kDeep, 4, Y>;
        });
        run(c, w, part, x + static_cast<int64_t>(first) * w.cols, norm, n, eps,
            y.as<Y>() + first * y.stride[0], y.stride[0]);
    }
}

template <typename Y>
void few_of_kind(Context& c, const Packed& w, const float* x, const float* norm, int rows, float eps,
                 Tensor& y) {
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        if (part.kind == Kind::bf16) few<Kind::bf16, Y>(c, w, part, x, norm, rows, eps, y);
        if (part.kind == Kind::fp8) few<Kind::fp8, Y>(c, w, part, x, norm, rows, eps, y);
        if (part.kind == Kind::nvfp4) few<Kind::nvfp4, Y>(c, w, part, x, norm, rows, eps, y);
    }
}

}  // namespace

bool leave_norm(Context& c, const Tensor& x, NormWork& work) {
    if (c.after_count < 1 || c.after[0].op != &kNormLinear || c.after[0].inputs[0] != &x) return false;
    const Node& node = c.after[0];
    const auto& p = node.params<NormLinearParams>();
    const Tensor &y = *node.outputs[0], &h = *node.outputs[1];
    const int columns = static_cast<int>(x.shape[1]);
    if (x.shape[0] > kLeftRows || y.dtype != DType::BF16 || !leaves_tiles(columns) ||
        !dense_takes(c, *static_cast<const Packed*>(p.weight->placed), kLeftRows))
        return false;
    work = {node.inputs[1]->as<float>(), h.as<bf16>(), columns, c.sums};
    c.left_norm = {&node, c.sums, columns / kTileRows, 1.0f / static_cast<float>(columns), p.eps};
    return true;
}

void norm_linear(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &norm = *node.inputs[1];
    Tensor &y = *node.outputs[0], &h = *node.outputs[1];
    const auto& p = node.params<NormLinearParams>();
    const Packed& w = *static_cast<const Packed*>(p.weight->placed);
    const int rows = static_cast<int>(x.shape[0]);
    const bool f32 = y.dtype == DType::F32;
    const LeftNorm left = std::exchange(c.left_norm, {});
    if (left.node == &node) return left_linear(c, w, left, h, y);
    if (dense_takes(c, w, rows)) {
        const auto run = f32 ? few_of_kind<float> : few_of_kind<bf16>;
        return run(c, w, x.as<float>(), norm.as<float>(), rows, p.eps, y);
    }
    norm_rows(c, x.as<float>(), norm.as<float>(), rows, w.cols, p.eps, h.data);
    gemm(c, w, h.data, h.stride[0], rows, {y.data, y.stride[0], f32, nullptr, 0});
}

}  // namespace quern::cuda
