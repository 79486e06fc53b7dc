// concat on the GPU: a block 1,024 columns of a row, four a thread.
#include "ggml-like/ops/concat.h"

#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 256, kEach = 4;

struct Parts {
    const float* x[kMaxConcat];
};

__global__ void __launch_bounds__(kBlock)
    concat_kernel(const __grid_constant__ Parts parts, int columns, int all, bf16* y) {
    allow_successor();
    wait_for_predecessor();
    const int64_t t = blockIdx.x;
    const int at = (blockIdx.y * kBlock + threadIdx.x) * kEach;
    if (at >= all) return;
    const float4 v = *reinterpret_cast<const float4*>(parts.x[at / columns] + t * columns + at % columns);
    *reinterpret_cast<uint2*>(y + t * all + at) = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
}

}  // namespace

void concat(const Node& node, Context& c) {
    const Tensor& y = *node.outputs[0];
    const int columns = static_cast<int>(node.inputs[0]->shape[1]), all = static_cast<int>(y.shape[1]);
    if (y.dtype != DType::BF16) unsupported("concat", "activations other than BF16");
    if (columns % kEach != 0) unsupported("concat", "a width that is not a multiple of 4");
    Parts parts{};
    for (size_t i = 0; i < node.inputs.size(); ++i) parts.x[i] = node.inputs[i]->as<const float>();
    const int blocks = (all + kBlock * kEach - 1) / (kBlock * kEach);
    launch(c, "concat", concat_kernel, dim3(static_cast<unsigned>(y.shape[0]), static_cast<unsigned>(blocks)),
           dim3(kBlock), 0, parts, columns, all, y.as<bf16>());
}

}  // namespace quern::cuda
