// residual_add on the GPU: x' = residual + y, h and squares of it (cuda/linear/epilogue.cuh), then a router's logits.
//   answers: four lanes for 16 columns; the logits of cuda/moe/route_logits.h
//   prompts: a block a row; the logits' product is that of linear_add
//
// Traffic: y and the residual once, x' and h once. Bound: answers by the launch, prompts by memory.
#include "ggml-like/ops/residual_add.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/moe/route_logits.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;
using namespace moe;

namespace {

constexpr int kAnswerThreads = 128, kPromptThreads = 512;

struct Add {
    const float *y, *residual;
    float* x;
    Defer defer;

    /// Four columns from `column` on of row n.
    __device__ __forceinline__ float4 four(int64_t n, int column) const {
        const int64_t at = n * defer.columns + column;
        const float4 a = __ldcg(reinterpret_cast<const float4*>(residual + at));
        const float4 b = __ldcg(reinterpret_cast<const float4*>(y + at));
        const float4 v = make_float4(add_residual(a.x, b.x), add_residual(a.y, b.y), add_residual(a.z, b.z),
                                     add_residual(a.w, b.w));
        *reinterpret_cast<float4*>(x + at) = v;
        return v;
    }
    __device__ __forceinline__ float4 norm(int column) const {
        return *reinterpret_cast<const float4*>(defer.norm + column);
    }
};

/// blockIdx.y: the row.
__global__ void __launch_bounds__(kAnswerThreads) add_answer(Add a) {
    allow_successor();
    const int column = 4 * static_cast<int>(blockIdx.x * kAnswerThreads + threadIdx.x);
    if (column >= a.defer.columns) return;
    const float4 norm = a.norm(column);
    wait_for_predecessor();
    defer_four(a.defer, blockIdx.y, column, a.four(blockIdx.y, column), norm);
}

__global__ void __launch_bounds__(kPromptThreads) add_prompt(Add a) {
    allow_successor();
    wait_for_predecessor();
    const int64_t n = blockIdx.x;
    float sum = 0;
    for (int column = threadIdx.x * 4; column < a.defer.columns; column += kPromptThreads * 4) {
        const float4 v = a.four(n, column), norm = a.norm(column);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        *reinterpret_cast<uint2*>(a.defer.h + n * a.defer.columns + column) =
            make_uint2(pack_bf16(v.x * norm.x, v.y * norm.y), pack_bf16(v.z * norm.z, v.w * norm.w));
    }
    write_squares<kPromptThreads>(a.defer, n, sum);
}

}  // namespace

void residual_add(const Node& node, Context& c) {
    const Tensor &y = *node.inputs[0], &residual = *node.inputs[1], &x = *node.outputs[0];
    const auto& p = node.params<ResidualAddParams>();
    const Defer defer = defer_of(*node.inputs[2], *node.outputs[1], *node.outputs[2]);
    const Add add{y.as<float>(), residual.as<float>(), x.as<float>(), defer};
    const int rows = static_cast<int>(x.shape[0]);
    const bool answer = p.kind == StepKind::answer;
    const unsigned blocks = (defer.columns / 4 + kAnswerThreads - 1) / kAnswerThreads;
    if (answer)
        launch(c, "residual_add answer", add_answer, dim3(blocks, rows), kAnswerThreads, 0, add);
    else
        launch(c, "residual_add prompt", add_prompt, rows, kPromptThreads, 0, add);
    if (p.router == nullptr) return;
    const Packed& router = *static_cast<const Packed*>(p.router->placed);
    const Tensor& logits = *node.outputs[3];
    if (answer)
        route_logits(c, router, defer.h, rows, logits.as<int64_t>(), static_cast<int>(logits.stride[0]));
    else
        gemm(c, router, defer.h, defer.columns, rows, {.y = logits.data, .ld = logits.stride[0], .f32 = true},
             Split::by_matrix);
}

}  // namespace quern::cuda
