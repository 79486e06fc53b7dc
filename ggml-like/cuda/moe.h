// What the kernels of moe_gate_up and moe_down for few rows get to work with. Shapes: ops/moe_gate_up.h,
// ops/moe_down.h.
#pragma once

#include "ggml-like/cuda/left_norm.h"
#include "ggml-like/cuda/packed.h"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {

struct GateUp {
    PackedExperts experts;  // tiles = 0: none in this launch
    Part shared;            // tiles = 0: none in this launch
    int chunks;
    const bf16* h;  // [rows, columns]
    int columns;
    const int *ids, *groups;
    int rows, used, expert_count;
    bf16 *routed, *shared_out;  // [rows * used, F], [rows, Fs]
    LeftChoice left;            // up to kDownFewRows rows: ids have to be chosen first
};

/// What linear_add does for the mixture after it (route_work.cuh).
struct RouteWork {
    Part router;
    int chunks;  // of the router
    int logits;  // E + 1
    NormWork x;
    uint64_t* chosen;  // [used + 1], to be zeroed
    int used;
};
/// Whether the linear_add that makes `x` may do this for the nodes after it, which know from then on,
/// whatever its rows up to kDownFewRows.
bool leave_route(Context& context, const Tensor& x, RouteWork& work);

struct Down {
    PackedExperts experts;
    Part shared;
    int shared_chunks;
    const bf16 *routed, *shared_in;
    int width, shared_width;  // F, Fs
    const int *ids, *groups;
    const float *weights, *shared_gate, *residual;
    int rows, used;
    float* y;
    int64_t ld;
    float* terms;  // [rows * (used + 1), D] if rows > kDownFewRows
    bool settled;  // groups, ids and weights are complete before gate and up end (Context::settled_groups)
    const uint64_t*
        chosen;     // while gate and up run, ids and weights of one row come here; of more rows a sign that
                    // they are in `ids` and `weights`, as groups are. Null: they are, when `settled` says
    NormWork next;  // for the norm_linear after it, up to kDownFewRows rows
    RowSums* read;  // sums that gate and up have read and that have to be zeros again; null: none
};

/// Rows of a step for which the kernels below are made.
inline constexpr int kMostFp4Rows = 64;
/// Up to so many, moe_down adds terms without writing them to memory: one kernel less, but every block reads
/// all rows.
inline constexpr int kDownFewRows = 8;

inline constexpr int kMostLeftExperts = 256, kMostLeftUsed = 8;
static_assert(kDownFewRows == kLeftRows && kMostLeftExperts < kLeftLogits);
/// Whether the node's kernels can choose experts themselves: all NVFP4, for any rows up to kDownFewRows.
bool gate_up_chooses(const Context& context, const Node& gate_up);
/// Whether gate_up_fp4 takes so many rows; of up to kDownFewRows all or none.
bool gate_up_fp4_fits(const Context& context, GateUp a);

/// Makes the sums that gate and up have read zeros again, where the kernels of moe_down do not.
void clear_sums(Context& context, const Down& a);

/// Weights all nvfp4. False: too many rows, or they do not fit into shared memory; nothing was done.
bool gate_up_fp4(Context& context, const GateUp& a);
bool down_fp4(Context& context, const Down& a);
/// Whether down_fp4 takes up to kDownFewRows rows without terms in memory, and so can do what `next` says.
bool down_fp4_fits(const Context& context, const Down& a);

}  // namespace quern::cuda
