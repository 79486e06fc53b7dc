// gather_rows on the GPU: a block a row.
#include "ggml-like/ops/gather_rows.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/ptx/batches.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 256;

/// Rows of `columns` BF16 numbers and of `numbers` F32 numbers.
__global__ void __launch_bounds__(kBlock)
    gather_kernel(const uint16_t* h, const float* squares, const int* rows, int count, int columns,
                  int numbers, uint16_t* to_h, float* to_squares) {
    allow_successor();
    bring_near(count), bring_near(to_squares);
    wait_for_predecessor();
    const int64_t from = min(max(__ldcg(rows + blockIdx.x), 0), count - 1), to = blockIdx.x;
    in_batches<kBlock, 8>(
        columns, [&](int k) { return __ldcg(h + from * columns + k); },
        [&](int k, uint16_t x) { to_h[to * columns + k] = x; });
    in_batches<kBlock, 1>(
        numbers, [&](int k) { return __ldcg(squares + from * numbers + k); },
        [&](int k, float x) { to_squares[to * numbers + k] = x; });
}

}  // namespace

void gather_rows(const Node& node, Context& c) {
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1], &rows = *node.inputs[2];
    const Tensor &to_h = *node.outputs[0], &to_squares = *node.outputs[1];
    if (h.dtype != DType::BF16) unsupported("gather_rows", "activations other than BF16");
    launch(c, "gather_rows", gather_kernel, static_cast<unsigned>(to_h.shape[0]), kBlock, 0, h.as<uint16_t>(),
           squares.as<float>(), rows.as<int>(), static_cast<int>(h.shape[0]), static_cast<int>(h.shape[1]),
           static_cast<int>(squares.shape[1]), to_h.as<uint16_t>(), to_squares.as<float>());
}

}  // namespace quern::cuda
