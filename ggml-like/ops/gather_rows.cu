// gather_rows on the GPU: a block a row.
#include "ggml-like/ops/gather_rows.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {
namespace {

constexpr int kBlock = 256;

__global__ void __launch_bounds__(kBlock)
    gather_kernel(const float* x, const int* rows, int count, int columns, float* y) {
    allow_successor();
    wait_for_predecessor();
    const int64_t from = min(max(__ldcg(rows + blockIdx.x), 0), count - 1);
    for (int k = threadIdx.x; k < columns; k += kBlock)
        y[static_cast<int64_t>(blockIdx.x) * columns + k] = __ldcg(x + from * columns + k);
}

}  // namespace

void gather_rows(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &rows = *node.inputs[1], &y = *node.outputs[0];
    launch(c, "gather_rows", gather_kernel, static_cast<unsigned>(y.shape[0]), kBlock, 0, x.as<float>(),
           rows.as<int>(), static_cast<int>(x.shape[0]), static_cast<int>(x.shape[1]), y.as<float>());
}

}  // namespace quern::cuda
