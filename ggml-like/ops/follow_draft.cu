// follow_draft on the GPU: one block. Bound: latency.
#include "ggml-like/ops/follow_draft.h"

#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 256;

/// A tensor of `count` numbers that is changed; null: there is none.
struct Changed {
    const int* from;
    int* to;
    int count;
};

struct Followed {
    const int *row_sequence, *start, *slots, *follows, *source, *drafts, *chosen;
    int sequences;
    Changed ids, last_rows, later_positions, later_rope;

    /// Whether sequence s follows a choice, and which one.
    __device__ bool choice(int s, int2& c) const {
        if (s < 0 || __ldcg(follows + s) == 0) return false;
        c = __ldcg(reinterpret_cast<const int2*>(chosen) + __ldcg(slots + s));
        return true;
    }
};

__device__ void raise(const Followed& f, const Changed& c) {
    for (int k = threadIdx.x; k < c.count; k += kBlock) {
        int2 choice;
        c.to[k] = __ldcg(c.from + k) + (f.choice(k % f.sequences, choice) ? choice.x : 0);
    }
}

__global__ void __launch_bounds__(kBlock) follow_draft_kernel(Followed f) {
    allow_successor();
    wait_for_predecessor();
    int2 choice;
    for (int t = threadIdx.x; t < f.ids.count; t += kBlock) {
        const int source = __ldcg(f.source + t), s = __ldcg(f.row_sequence + t);
        int id = __ldcg(source >= 0 ? f.drafts + source : f.ids.from + t);
        if (f.choice(s, choice) && t == __ldcg(f.start + s) + choice.x - 1) id = choice.y;
        f.ids.to[t] = id;
    }
    for (int s = threadIdx.x; s < f.last_rows.count; s += kBlock)
        f.last_rows.to[s] =
            f.choice(s, choice) ? __ldcg(f.start + s) + choice.x - 1 : __ldcg(f.last_rows.from + s);
    raise(f, f.later_positions);
    raise(f, f.later_rope);
}

}  // namespace

void follow_draft(const Node& node, Context& c) {
    const auto& has = node.params<FollowDraftParams>();
    size_t next = 1;  // of the outputs
    const auto changed = [&](size_t in, size_t out) {
        return Changed{node.inputs[in]->as<int>(), node.outputs[out]->as<int>(),
                       static_cast<int>(node.inputs[in]->elements())};
    };
    const auto optional = [&](bool there) {
        if (!there) return Changed{};
        ++next;
        return changed(next + 5, next - 1);
    };
    Followed f{node.inputs[1]->as<int>(), node.inputs[2]->as<int>(),
               node.inputs[3]->as<int>(), node.inputs[4]->as<int>(),
               node.inputs[5]->as<int>(), node.inputs[6]->as<int>(),
               node.state[0]->as<int>(),  static_cast<int>(node.inputs[3]->shape[0])};
    f.ids = changed(0, 0);
    f.last_rows = optional(has.last_rows);
    f.later_positions = optional(has.later_positions);
    f.later_rope = optional(has.later_rope);
    launch(c, "follow_draft", follow_draft_kernel, 1, kBlock, 0, f);
}

}  // namespace quern::cuda
