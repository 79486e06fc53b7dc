// write_ring on the GPU: a block a row.
#include "ggml-like/ops/write_ring.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/ptx/batches.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 256;

struct Rows {
    const float* x;
    const int *positions, *row_sequence, *start, *slots;
    int width, entries;
    float* ring;
};

__global__ void __launch_bounds__(kBlock) write_ring_kernel(Rows r) {
    allow_successor();
    bring_near(r.width), bring_near(r.ring);
    wait_for_predecessor();
    const int t = blockIdx.x, s = __ldcg(r.row_sequence + t);
    if (s < 0 || __ldcg(r.start + s + 1) - t > r.entries) return;
    const int64_t row =
        static_cast<int64_t>(__ldcg(r.slots + s)) * r.entries + __ldcg(r.positions + t) % r.entries;
    const float* from = r.x + static_cast<int64_t>(t) * r.width;
    in_batches<kBlock, 8>(
        r.width, [&](int k) { return __ldcg(from + k); },
        [&](int k, float x) { r.ring[row * r.width + k] = x; });
}

}  // namespace

void write_ring(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &ring = *node.state[0];
    launch(c, "write_ring", write_ring_kernel, static_cast<unsigned>(x.shape[0]), kBlock, 0,
           Rows{x.as<float>(), node.inputs[1]->as<int>(), node.inputs[2]->as<int>(),
                node.inputs[3]->as<int>(), node.inputs[4]->as<int>(), static_cast<int>(x.shape[1]),
                static_cast<int>(ring.shape[1]), ring.as<float>()});
}

}  // namespace quern::cuda
