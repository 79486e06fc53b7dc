// norm_gate_up on the GPU. A tile of 16 packed rows holds 8 rows of gate and the same 8 of up.
//   few rows (<= 16): every block normalises x for itself and streams its tiles of W (cuda/dense_rows.cuh)
//   many rows: one kernel writes h, then the paired tiled product of cuda/gemm.h
#include "ggml-like/ops/norm_gate_up.h"

#include "ggml-like/cuda/dense_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/norm_rows.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"

namespace quern::cuda {
namespace {

struct StoreGated {
    static constexpr bool kPaired = true;
    using Loaded = float;
    bf16* y;
    int64_t ld;

    __device__ __forceinline__ void store(int row, int n, float gate, float up) const {
        y[n * ld + row] = __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
    }
};

template <Kind K, int NT, bool kDeep, int kTogether>
__global__ void __launch_bounds__(kThreads, 3 - NT)
    norm_gate_up_few(Part part, int chunks, NormRows<K, kTogether> prologue, bf16* y, int64_t ld) {
    dense_rows<K, NT, kDeep, kTogether == 1, kTogether == 1>(part, chunks, prologue.rows, prologue,
                                                             StoreGated{y, ld});
}

template <Kind K, int NT, bool kDeep, int kTogether>
void few(Context& c, const Packed& w, const float* x, const float* norm, int rows, float eps, bf16* y,
         int64_t ld) {
    const Part& part = w.part[0];  // paired order has one
    const NormRows<K, kTogether> prologue{x, norm, w.cols, rows, eps, 1.0f / w.cols, {}};
    launch(c, "norm_gate_up", norm_gate_up_few<K, NT, kDeep, kTogether>,
           min(c.sms, dense_groups<K>(part.tiles, w.chunks)), kThreads,
           dense_shared_bytes<K, NT, kDeep, kTogether == 1>(rows, w.chunks), part, w.chunks, prologue, y, ld);
}

template <Kind K>
void few(Context& c, const Packed& w, const Tensor& x, const float* norm, float eps, Tensor& y) {
    const int rows = static_cast<int>(x.shape[0]);
    for (int first = 0, n = 0; first < rows; first += n) {
        n = dense_rows_at_once<K>(c, rows - first, w.chunks);
        const auto run = dense_shape<K>(c, n, w.chunks, [&]<int NT, bool kDeep>() {
            if constexpr (NT == 1)
                return n == 1 ? few<K, NT, kDeep, 1> : few<K, NT, kDeep, 4>;
            else
                return few<K, NT, kDeep, 4>;
        });
        run(c, w, x.as<float>() + static_cast<int64_t>(first) * w.cols, norm, n, eps,
            y.as<bf16>() + first * y.stride[0], y.stride[0]);
    }
}

}  // namespace

void norm_gate_up(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &norm = *node.inputs[1];
    Tensor &y = *node.outputs[0], &h = *node.outputs[1];
    const auto& p = node.params<NormGateUpParams>();
    const Packed& w = *static_cast<const Packed*>(p.weight->placed);
    const int rows = static_cast<int>(x.shape[0]);
    if (dense_takes(c, w, rows)) {
        const Kind kind = w.part[0].kind;
        const auto run = kind == Kind::bf16  ? few<Kind::bf16>
                         : kind == Kind::fp8 ? few<Kind::fp8>
                                             : few<Kind::nvfp4>;
        return run(c, w, x, norm.as<float>(), p.eps, y);
    }
    norm_rows(c, x.as<float>(), norm.as<float>(), rows, w.cols, p.eps, h.data);
    gemm_paired(c, w, h.data, h.stride[0], rows, y.data, y.stride[0]);
}

}  // namespace quern::cuda
