// best_token on the GPU, in one kernel: each block finds the best of its columns, the last one the best of these.
// Traffic: the logits once. Bound: latency.
#include "ggml-like/ops/best_token.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/best_column.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace linear;

namespace {

constexpr int kBlock = 512;
constexpr int kColumns = 4 * kBlock;  // of a block at a time

__global__ void __launch_bounds__(kBlock)
    best_token_kernel(const float* logits, int64_t ld, int count, BestColumns best) {
    allow_successor();
    wait_for_predecessor();
    const int row = blockIdx.y, blocks = static_cast<int>(gridDim.x);
    logits += row * ld;
    unsigned long long own = 0;
    for (int begin = blockIdx.x * kColumns; begin < count; begin += blocks * kColumns)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int c = begin + i * kBlock + static_cast<int>(threadIdx.x);
            if (c < count) own = max(own, best.key(__ldcg(logits + c), c));
        }
    best.choose<kBlock / 32>(row, blocks, own);
}

}  // namespace

void best_token(const Node& node, Context& c) {
    const Tensor& logits = *node.inputs[0];
    const int rows = static_cast<int>(logits.shape[0]), count = static_cast<int>(logits.shape[1]);
    BestColumns best = best_columns(node.params<TokenColumns>(), *node.outputs[0], *node.outputs[1], c);
    int blocks = min((count + kColumns - 1) / kColumns, kBestBlocks);
    while (blocks > 4 && blocks * rows > 2 * c.sms) blocks = (blocks + 1) / 2;
    const float* from = logits.as<const float>();
    for (int first = 0; first < rows; first += kCounters) {
        launch(c, "best_token", best_token_kernel, dim3(blocks, min(kCounters, rows - first)), kBlock, 0,
               from, logits.stride[0], count, best);
        from += kCounters * logits.stride[0];
        best.ids += kCounters, best.work += int64_t{kCounters} * kBestBlocks;
    }
}

}  // namespace quern::cuda
