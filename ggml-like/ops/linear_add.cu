// linear_add on the GPU: one row and few rows stream the weight (cuda/dense_one.cuh, cuda/dense_rows.cuh),
// many rows use the tiled product of cuda/gemm.h; all add the residual at the store.
#include "ggml-like/ops/linear_add.h"

#include "ggml-like/cuda/dense_one.cuh"
#include "ggml-like/cuda/dense_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"

namespace quern::cuda {
namespace {

template <Kind K, int NT, bool kDeep, bool kOne>
__global__ void __launch_bounds__(kThreads, 3 - NT)
    linear_add_few(Part part, int chunks, PlainRows<K, kOne ? 1 : 8> prologue, const float* residual,
                   float* y, int64_t ld) {
    dense_rows<K, NT, kDeep, kOne, false>(part, chunks, prologue.rows, prologue,
                                          AddResidual{residual + part.row_begin, y + part.row_begin, ld});
}

template <Kind K>
__global__ void __launch_bounds__(kThreads, 2)
    linear_add_one(Part part, OneShape<K, false> shape, PlainRows<K, 1, OneOrder<K>> prologue,
                   const float* residual, float* y) {
    dense_one<K, false>(part, shape, prologue, AddResidual{residual + part.row_begin, y + part.row_begin, 0});
}

template <Kind K>
void one(Context& c, const Packed& w, const Part& part, const Tensor& x, const Tensor& residual, Tensor& y) {
    const OneShape<K, false> shape(c, part, w.chunks);
    const PlainRows<K, 1, OneOrder<K>> prologue{x.as<bf16>(), 0, w.cols, 1};
    launch(c, "linear_add", linear_add_one<K>, shape.grid, kThreads, shape.bytes(), part, shape, prologue,
           residual.as<float>(), y.as<float>());
}

template <Kind K>
void few(Context& c, const Packed& w, const Part& part, const Tensor& x, const Tensor& residual, Tensor& y) {
    const int rows = static_cast<int>(x.shape[0]);
    if (rows == 1 && dense_one_fits<K, false>(c, part, w.chunks)) return one<K>(c, w, part, x, residual, y);
    const int grid = min(c.sms, dense_groups<K>(part.tiles, w.chunks));
    for (int first = 0, n = 0; first < rows; first += n) {
        n = dense_rows_at_once<K>(c, rows - first, w.chunks);
        const int64_t at = first * y.stride[0];
        dense_shape<K>(c, n, w.chunks, [&]<int NT, bool kDeep>() {
            const auto run = [&]<bool kOne>() {
                const PlainRows<K, kOne ? 1 : 8> prologue{x.as<bf16>() + first * x.stride[0], x.stride[0],
                                                          w.cols, n};
                launch(c, "linear_add", linear_add_few<K, NT, kDeep, kOne>, grid, kThreads,
                       dense_shared_bytes<K, NT, kDeep>(n, w.chunks), part, w.chunks, prologue,
                       residual.as<float>() + at, y.as<float>() + at, y.stride[0]);
            };
            if (NT == 1 && n == 1)
                run.template operator()<NT == 1>();
            else
                run.template operator()<false>();
        });
    }
}

}  // namespace

void linear_add(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &residual = *node.inputs[1];
    Tensor& y = *node.outputs[0];
    const Packed& w = *static_cast<const Packed*>(node.params<LinearAddParams>().weight->placed);
    const int rows = static_cast<int>(x.shape[0]);
    if (!dense_takes(c, w, rows))
        return gemm(c, w, x.data, x.stride[0], rows,
                    {y.data, y.stride[0], true, residual.as<float>(), residual.stride[0]});
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        if (part.kind == Kind::bf16) few<Kind::bf16>(c, w, part, x, residual, y);
        if (part.kind == Kind::fp8) few<Kind::fp8>(c, w, part, x, residual, y);
        if (part.kind == Kind::nvfp4) few<Kind::nvfp4>(c, w, part, x, residual, y);
    }
}

}  // namespace quern::cuda
