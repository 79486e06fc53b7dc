// layer_norm on the GPU: a block a row, which reads it three times, from the cache but for the first. Bound: memory, once
// read F32, once written BF16.
#include "ggml-like/ops/layer_norm.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/cuda/vision_ops.h"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 128, kWarps = kBlock / 32;

/// Of all threads, for all of them.
__device__ float block_sum(float x, float* shared) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w];
    return sum;
}

__global__ void __launch_bounds__(kBlock)
    layer_norm_kernel(const float* x, const float* weight, const float* bias, int width, float eps, bf16* y) {
    __shared__ float sums[2][kWarps];
    allow_successor();
    wait_for_predecessor();
    x += static_cast<int64_t>(blockIdx.x) * width;
    y += static_cast<int64_t>(blockIdx.x) * width;
    float sum = 0, squares = 0;
    for (int k = threadIdx.x; k < width; k += kBlock) sum += x[k];
    const float mean = block_sum(sum, sums[0]) / width;
    for (int k = threadIdx.x; k < width; k += kBlock) squares += (x[k] - mean) * (x[k] - mean);
    const float factor = rsqrtf(block_sum(squares, sums[1]) / width + eps);
    for (int k = threadIdx.x; k < width; k += kBlock)
        y[k] = __float2bfloat16((x[k] - mean) * factor * weight[k] + bias[k]);
}

}  // namespace

void layer_norm(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    if (y.dtype != DType::BF16) unsupported("layer_norm", "activations other than BF16");
    launch(c, "layer_norm", layer_norm_kernel, static_cast<unsigned>(x.shape[0]), kBlock, 0,
           x.as<const float>(), node.inputs[1]->as<const float>(), node.inputs[2]->as<const float>(),
           static_cast<int>(x.shape[1]), node.params<LayerNormParams>().eps, y.as<bf16>());
}

}  // namespace quern::cuda
