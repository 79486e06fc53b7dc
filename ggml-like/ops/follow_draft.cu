// follow_draft on the GPU: a block for each tensor that is changed. Bound: latency, so loads that do not need each other come together.
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

    /// Of sequence s.
    struct Own {
        int first, slot, follows;
    };
    __device__ Own of(int s) const { return {__ldcg(start + s), __ldcg(slots + s), __ldcg(follows + s)}; }
    /// {rows, id} that it follows; no rows: it follows none.
    __device__ int2 choice(const Own& own) const {
        return own.follows != 0 ? __ldcg(reinterpret_cast<const int2*>(chosen) + own.slot) : int2{0, 0};
    }
    __device__ void change_id(int t) const {
        const int from = __ldcg(source + t), s = __ldcg(row_sequence + t), given = __ldcg(ids.from + t);
        Own own = of(0);  // of the only sequence, most often
        if (s > 0) own = of(s);
        const int drafted = from >= 0 ? __ldcg(drafts + from) : given;
        const int2 c = s >= 0 ? choice(own) : int2{0, 0};
        ids.to[t] = c.x > 0 && t == own.first + c.x - 1 ? c.y : drafted;
    }
    __device__ void change_last_row(int s) const {
        const int given = __ldcg(last_rows.from + s);
        const Own own = of(s);
        const int2 c = choice(own);
        last_rows.to[s] = c.x > 0 ? own.first + c.x - 1 : given;
    }
    /// As many positions higher as its sequence follows rows.
    __device__ void raise(const Changed& positions, int k) const {
        const int given = __ldcg(positions.from + k);
        positions.to[k] = given + choice(of(k % sequences)).x;
    }
};

__global__ void __launch_bounds__(kBlock) follow_draft_kernel(Followed f) {
    allow_successor();
    bring_near(f.start), bring_near(f.chosen), bring_near(f.ids.to), bring_near(f.later_rope.to);
    wait_for_predecessor();
    const int own = static_cast<int>(threadIdx.x);
    if (blockIdx.x == 0)
        for (int t = own; t < f.ids.count; t += kBlock) f.change_id(t);
    else if (blockIdx.x == 1)
        for (int s = own; s < f.last_rows.count; s += kBlock) f.change_last_row(s);
    else if (blockIdx.x == 2)
        for (int k = own; k < f.later_positions.count; k += kBlock) f.raise(f.later_positions, k);
    else
        for (int k = own; k < f.later_rope.count; k += kBlock) f.raise(f.later_rope, k);
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
    launch(c, "follow_draft", follow_draft_kernel, 4, kBlock, 0, f);
}

}  // namespace quern::cuda
