// follow_choice on the GPU: a thread a row. Bound: latency. What comes after it reads positions before it waits: see EmbedParams.
#include "ggml-like/ops/follow_choice.h"

#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 64;

struct Followed {
    const int *ids, *positions, *row_sequence, *start, *slots, *follows, *chosen;
    int *to_ids, *to_positions;
    int rows;
};

__global__ void __launch_bounds__(kBlock) follow_choice_kernel(Followed f) {
    wait_for_predecessor();
    const int t = blockIdx.x * kBlock + threadIdx.x;
    if (t >= f.rows) return;
    int id = __ldcg(f.ids + t), position = __ldcg(f.positions + t);
    const int s = __ldcg(f.row_sequence + t);
    if (s >= 0 && __ldcg(f.follows + s) != 0) {
        const int* chosen = f.chosen + 2 * __ldcg(f.slots + s);
        position += __ldcg(chosen);
        if (t == __ldcg(f.start + s)) id = __ldcg(chosen + 1);
    }
    f.to_ids[t] = id, f.to_positions[t] = position;
}

}  // namespace

void follow_choice(const Node& node, Context& c) {
    const auto input = [&](size_t i) { return node.inputs[i]->as<const int>(); };
    const int rows = static_cast<int>(node.inputs[0]->shape[0]);
    launch(c, "follow_choice", follow_choice_kernel, static_cast<unsigned>((rows + kBlock - 1) / kBlock),
           kBlock, 0,
           Followed{input(0), input(1), input(2), input(3), input(4), input(5), node.state[0]->as<int>(),
                    node.outputs[0]->as<int>(), node.outputs[1]->as<int>(), rows});
}

}  // namespace quern::cuda
