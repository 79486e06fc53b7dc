// patch_values and grid_embedding on the GPU. Bound: memory.
#include "ggml-like/ops/patches.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/cuda/vision_ops.h"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 256, kEach = 4;

__global__ void __launch_bounds__(kBlock) patch_values_kernel(const uint32_t* x, uint2* y, int64_t words) {
    allow_successor();
    wait_for_predecessor();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
    if (i >= words) return;
    const uint32_t four = x[i];
    float v[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) v[k] = (static_cast<float>(four >> (8 * k) & 255) - 127.5f) / 127.5f;
    y[i] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])};
}

/// Where index i of n lies in a table's axis: between two entries.
struct Between {
    int low, high;
    float part;
    __device__ Between(int i, int n, int side) {
        const float s =
            static_cast<float>(i) * (static_cast<float>(side - 1) / static_cast<float>(max(n - 1, 1)));
        low = min(static_cast<int>(s), side - 1);
        high = min(low + 1, side - 1);
        part = s - static_cast<float>(low);
    }
};

__global__ void __launch_bounds__(kBlock)
    grid_embedding_kernel(const int4* place, const float* table, int side, int width, float* y) {
    allow_successor();
    wait_for_predecessor();
    const int4 at = place[blockIdx.x];
    const Between r(at.x, at.z, side), c(at.y, at.w, side);
    const float weight[4] = {(1 - r.part) * (1 - c.part), (1 - r.part) * c.part, r.part * (1 - c.part),
                             r.part * c.part};
    const float* row[4] = {table + static_cast<int64_t>(side * r.low + c.low) * width,
                           table + static_cast<int64_t>(side * r.low + c.high) * width,
                           table + static_cast<int64_t>(side * r.high + c.low) * width,
                           table + static_cast<int64_t>(side * r.high + c.high) * width};
    for (int k = threadIdx.x; k < width; k += kBlock)
        y[static_cast<int64_t>(blockIdx.x) * width + k] =
            weight[0] * row[0][k] + weight[1] * row[1][k] + weight[2] * row[2][k] + weight[3] * row[3][k];
}

}  // namespace

void patch_values(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    if (y.dtype != DType::BF16) unsupported("patch_values", "activations other than BF16");
    if (x.elements() % kEach != 0)
        unsupported("patch_values", "patches of a number of bytes that is no multiple of 4");
    const int64_t words = x.elements() / kEach;
    launch(c, "patch_values", patch_values_kernel, static_cast<unsigned>((words + kBlock - 1) / kBlock),
           kBlock, 0, x.as<const uint32_t>(), y.as<uint2>(), words);
}

void grid_embedding(const Node& node, Context& c) {
    const Tensor &place = *node.inputs[0], &table = *node.inputs[1], &y = *node.outputs[0];
    int side = 1;
    while (static_cast<int64_t>(side) * side < table.shape[0]) ++side;
    launch(c, "grid_embedding", grid_embedding_kernel, static_cast<unsigned>(place.shape[0]), kBlock, 0,
           place.as<const int4>(), table.as<const float>(), side, static_cast<int>(table.shape[1]),
           y.as<float>());
}

}  // namespace quern::cuda
