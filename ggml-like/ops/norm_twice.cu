// norm_twice on the GPU: a block a row, which reads it twice. Bound: latency.
#include "ggml-like/ops/norm_twice.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 512, kWarps = kBlock / 32;

struct Rows {
    const float *x, *first, *second;
    const int* rows;  // or null
    int count, width;
    float eps;
    bf16* y;
};

/// The factor of the whole row: of both norms.
__device__ float factor_of(float squares, float weighted, int width, float eps) {
    __shared__ float sums[2][kWarps];
    squares = warp_sum(squares);
    weighted = warp_sum(weighted);
    if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = squares, sums[1][threadIdx.x / 32] = weighted;
    __syncthreads();
    float all[2] = {0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all[0] += sums[0][w], all[1] += sums[1][w];
    const float one = rsqrtf(all[0] / width + eps);
    return one * rsqrtf(all[1] * one * one / width + eps);
}

__global__ void __launch_bounds__(kBlock) norm_twice_kernel(Rows r) {
    allow_successor();
    wait_for_predecessor();
    const int t = blockIdx.x;
    const int from = r.rows == nullptr ? t : min(max(__ldcg(r.rows + t), 0), r.count - 1);
    const float* x = r.x + static_cast<int64_t>(from) * r.width;
    float squares = 0, weighted = 0;
    for (int k = threadIdx.x; k < r.width; k += kBlock) {
        const float v = __ldcg(x + k), u = v * r.first[k];
        squares += v * v;
        weighted += u * u;
    }
    const float factor = factor_of(squares, weighted, r.width, r.eps);
    for (int k = threadIdx.x; k < r.width; k += kBlock)
        r.y[static_cast<int64_t>(t) * r.width + k] =
            __float2bfloat16(__ldcg(x + k) * factor * r.first[k] * r.second[k]);
}

}  // namespace

void norm_twice(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    if (y.dtype != DType::BF16) unsupported("norm_twice", "activations other than BF16");
    launch(
        c, "norm_twice", norm_twice_kernel, static_cast<unsigned>(y.shape[0]), kBlock, 0,
        Rows{x.as<float>(), node.inputs[1]->as<float>(), node.inputs[2]->as<float>(),
             node.inputs.size() > 3 ? node.inputs[3]->as<const int>() : nullptr, static_cast<int>(x.shape[0]),
             static_cast<int>(x.shape[1]), node.params<NormTwiceParams>().eps, y.as<bf16>()});
}

}  // namespace quern::cuda
