// best_token on the GPU, in one kernel: each block finds the best of its columns, the last one the best of these.
// Traffic: the logits once. Bound: latency. An edge of the graph that all kernels before it must cross.
#include "ggml-like/ops/best_token.h"

#include "ggml-like/cuda/launch_after_all.cuh"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace moe;

namespace {

constexpr int kBlock = 512, kWarps = kBlock / 32, kMaxBlocks = 256;
constexpr int kColumns = 4 * kBlock;  // of a block at a time

struct Best {
    const float* logits;
    int64_t ld;
    int count, first, start, vocab;
    int* ids;
    unsigned long long* work;  // [rows, kMaxBlocks]
    unsigned* counters;        // one a row

    Best from_row(int row) const {
        Best b = *this;
        b.logits += row * ld, b.ids += row, b.work += static_cast<int64_t>(row) * kMaxBlocks;
        return b;
    }
};

/// Larger for a higher logit, then for a lower column; 0 where the column may not win.
__device__ unsigned long long key_of(const Best& b, float logit, int column) {
    const int token = column < b.first ? b.start + column : column - b.first;
    if (logit != logit || token >= b.vocab) return 0;
    return static_cast<unsigned long long>(ordered_bits(logit + 0.0f)) << 32 | ~static_cast<uint32_t>(column);
}

/// All threads get the largest of the block.
__device__ unsigned long long largest(unsigned long long own) {
    __shared__ unsigned long long of_warp[kWarps];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) own = max(own, __shfl_xor_sync(0xffffffffu, own, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
    __syncthreads();
    for (const unsigned long long other : of_warp) own = max(own, other);
    return own;
}

__global__ void __launch_bounds__(kBlock) best_token_kernel(Best b) {
    allow_successor();
    wait_for_predecessor();
    const int row = blockIdx.y, blocks = static_cast<int>(gridDim.x);
    const float* logits = b.logits + row * b.ld;
    unsigned long long own = 0;
    for (int begin = blockIdx.x * kColumns; begin < b.count; begin += blocks * kColumns)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int c = begin + i * kBlock + static_cast<int>(threadIdx.x);
            if (c < b.count) own = max(own, key_of(b, __ldcg(logits + c), c));
        }
    own = largest(own);
    unsigned long long* work = b.work + static_cast<int64_t>(row) * kMaxBlocks;
    if (threadIdx.x == 0) __stcg(work + blockIdx.x, own);
    if (!last_block(b.counters + row, gridDim.x)) return;
    own = static_cast<int>(threadIdx.x) < blocks ? __ldcg(work + threadIdx.x) : 0;
    own = largest(own);
    if (threadIdx.x > 0) return;
    const int column = static_cast<int>(~static_cast<uint32_t>(own));
    b.ids[row] = own == 0 ? 0 : column < b.first ? b.start + column : column - b.first;
}

}  // namespace

void best_token(const Node& node, Context& c) {
    const Tensor& logits = *node.inputs[0];
    const auto& columns = node.params<TokenColumns>();
    const int rows = static_cast<int>(logits.shape[0]), count = static_cast<int>(logits.shape[1]);
    const Best all{logits.as<float>(),
                   logits.stride[0],
                   count,
                   static_cast<int>(columns.first),
                   static_cast<int>(columns.start),
                   static_cast<int>(columns.vocab),
                   node.outputs[0]->as<int>(),
                   node.outputs[1]->as<unsigned long long>(),
                   c.counters};
    int blocks = min((count + kColumns - 1) / kColumns, kMaxBlocks);
    while (blocks > 4 && blocks * rows > 2 * c.sms) blocks = (blocks + 1) / 2;
    // The forward pass that comes next reads keys of this one, and its attention does so before it waits
    // (attention/decode_keys.cuh).
    for (int first = 0; first < rows; first += kCounters)
        launch_after_all(c, "best_token", best_token_kernel, dim3(blocks, min(kCounters, rows - first)),
                         kBlock, 0, all.from_row(first));
}

}  // namespace quern::cuda
