// accept_drafts on the GPU: a warp a sequence. What a step's nodes do not write, and that is all but the logits, is read before the
// wait. Bound: latency.
#include "ggml-like/ops/accept_drafts.h"

#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/ops/logits_top.h"

namespace quern::cuda {

using namespace ptx;

namespace {

struct Drafted {
    const int *ids, *start, *slots, *top, *source, *later;
    int* chosen;

    __device__ int id_of(int t) const {
        const int given = __ldcg(ids + t), other = source != nullptr ? __ldcg(source + t) : -1;
        return other >= 0 ? __ldcg(later + other) : given;
    }
};

__global__ void __launch_bounds__(32) accept_drafts_kernel(Drafted d) {
    allow_successor();
    const int s = blockIdx.x, lane = threadIdx.x, begin = __ldcg(d.start + s), end = __ldcg(d.start + s + 1);
    int* chosen = d.chosen + 2 * __ldcg(d.slots + s);
    pin(chosen);
    int t = begin + 1 + lane, id = t < end ? d.id_of(t) : 0;
    wait_for_predecessor();
    if (begin == end) return;
    int rows = 1;
    for (bool go_on = true; go_on && begin + rows < end;) {
        const bool right = t < end && id == __ldcg(d.top + (t - 1) * kTopWords);
        const unsigned wrong = __ballot_sync(0xffffffffu, !right);
        go_on = wrong == 0;
        rows += go_on ? 32 : __ffs(wrong) - 1;
        t += 32;
        if (go_on && t < end) id = d.id_of(t);
    }
    if (lane > 0) return;
    chosen[0] = rows, chosen[1] = __ldcg(d.top + (begin + rows - 1) * kTopWords);
}

}  // namespace

void accept_drafts(const Node& node, Context& c) {
    const bool later = node.inputs.size() > 4;
    launch(c, "accept_drafts", accept_drafts_kernel, static_cast<unsigned>(node.inputs[2]->shape[0]), 32, 0,
           Drafted{node.inputs[0]->as<int>(), node.inputs[1]->as<int>(), node.inputs[2]->as<int>(),
                   node.inputs[3]->as<int>(), later ? node.inputs[4]->as<int>() : nullptr,
                   later ? node.inputs[5]->as<int>() : nullptr, node.state[0]->as<int>()});
}

}  // namespace quern::cuda
