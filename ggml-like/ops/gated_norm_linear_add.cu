// gated_norm_linear_add on the GPU: few rows norm and gate in every block's prologue and stream the weight
// (cuda/dense_rows.cuh); many rows write h first, then use the tiled product of cuda/gemm.h.
#include "ggml-like/ops/gated_norm_linear_add.h"

#include "ggml-like/cuda/dense_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/norm_rows.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"

namespace quern::cuda {
namespace {

template <Kind K, int NT>
__global__ void __launch_bounds__(kThreads, 3 - NT)
    gated_norm_linear_add_few(Part part, int chunks, GatedRows<K> prologue, const float* residual, float* y,
                              int64_t ld) {
    dense_rows<K, NT>(part, chunks, prologue.rows, prologue,
                      AddResidual{residual + part.row_begin, y + part.row_begin, ld});
}

struct Arguments {
    const Tensor &o, &z, &norm, &residual;
    Tensor& y;
    float eps;
};

template <Kind K>
void few(Context& c, const Packed& w, const Part& part, const Arguments& a) {
    const int rows = static_cast<int>(a.o.shape[0]);
    const int grid = min(c.sms, dense_groups<K>(part.tiles, w.chunks));
    for (int first = 0, n = 0; first < rows; first += n) {
        n = dense_rows_at_once<K>(c, rows - first, w.chunks);
        const GatedRows<K> prologue{a.o.as<bf16>() + first * a.o.stride[0],
                                    a.z.as<bf16>() + first * a.z.stride[0],
                                    a.z.stride[0],
                                    a.norm.as<float>(),
                                    static_cast<int>(a.o.shape[1]),
                                    static_cast<int>(a.o.shape[2]),
                                    n,
                                    a.eps};
        const auto kernel = n <= 8 ? gated_norm_linear_add_few<K, 1> : gated_norm_linear_add_few<K, 2>;
        const int bytes = n <= 8 ? dense_shared_bytes<K, 1>(n, w.chunks) : dense_shared_bytes<K, 2>(n, w.chunks);
        const int64_t at = first * a.y.stride[0];
        launch(c, "gated_norm_linear_add", kernel, grid, kThreads, bytes, part, w.chunks, prologue,
               a.residual.as<float>() + at, a.y.as<float>() + at, a.y.stride[0]);
    }
}

}  // namespace

void gated_norm_linear_add(const Node& node, Context& c) {
    const auto& p = node.params<GatedNormLinearAddParams>();
    const Arguments a{*node.inputs[0], *node.inputs[1], *node.inputs[2], *node.inputs[3], *node.outputs[0], p.eps};
    Tensor& h = *node.outputs[1];
    const Packed& w = *static_cast<const Packed*>(p.weight->placed);
    const int rows = static_cast<int>(a.o.shape[0]);
    if (!dense_takes(c, w, rows)) {
        gated_norm_rows(c, {a.o.data, a.z.data, a.z.stride[0], a.norm.as<float>(), rows,
                            static_cast<int>(a.o.shape[1]), static_cast<int>(a.o.shape[2]), a.eps, h.data});
        return gemm(c, w, h.data, h.stride[0], rows,
                    {a.y.data, a.y.stride[0], true, a.residual.as<float>(), a.residual.stride[0]});
    }
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        if (part.kind == Kind::bf16) few<Kind::bf16>(c, w, part, a);
        if (part.kind == Kind::fp8) few<Kind::fp8>(c, w, part, a);
        if (part.kind == Kind::nvfp4) few<Kind::nvfp4>(c, w, part, a);
    }
}

}  // namespace quern::cuda
