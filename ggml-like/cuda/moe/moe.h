// What the kernels of moe_gate_up and moe_down get to work with. Shapes: ops/moe_gate_up.h, ops/moe_down.h.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/linear/deferred.h"
#include "ggml-like/cuda/pack/packed.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// Rows up to which a kernel of gate and up chooses experts itself, in every block, which is sooner than one block's choice
/// that all others wait for; and up to which moe_down adds terms without writing them to memory: one kernel less, but
/// every block reads all rows.
inline constexpr int kFewStepRows = 8;
/// Rows of a launch of the NVFP4 stream (fp4_stream.cuh).
inline constexpr int kMaxFp4Rows = 64;
/// Experts, and used ones, up to which a kernel of gate and up chooses.
inline constexpr int kMaxChoiceExperts = 256, kMaxChoiceUsed = 8;

/// Logits of rows: F32, or fixed point in answer steps (route_work.cuh); rows pitch apart.
struct Logits {
    const float* floats;  // null: the others
    const int64_t* sums;
    int pitch;
};

/// The choice of experts and where its results go (ops/moe_gate_up.h).
struct Choice {
    Logits logits;
    RowScale scale;
    int rows, experts, used;
    int* ids;
    float *weights, *shared_gate;
    int* groups;
    uint64_t*
        ready;  // [used + 1] route.cuh's Chosen of one row, the shared expert's gate last; of more rows the first
                // says that all is complete. Null in prompt steps: nobody is told
    float* factor;  // [rows] of the norm
};

/// Chooses and groups.
void choose_experts(Context& context, const Choice& choice);

struct GateUp {
    PackedExperts experts;  // tiles = 0: none in this launch
    Part shared;            // tiles = 0: none in this launch
    int chunks;
    const bf16* h;  // [rows, columns]
    int columns;
    const int *ids, *groups;
    int rows, used;
    bf16 *routed, *shared_out;  // [rows * used, F], [rows, Fs]
    const float* factor;        // of rows' sums
    Choice choice;              // of kernels that choose
    int first_pair = 0;         // in groups, of the launch's rows
};

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
    void* terms;            // [rows * (used + 1), D]: F32, in prompt steps BF16
    const uint64_t* ready;  // Choice::ready; null: all is complete when the predecessor has ended
    Defer next;
    int first_pair = 0;  // in groups, of the launch's rows
};

/// Whether the NVFP4 kernels of gate and up take the step: all weights are NVFP4 and rows fit.
bool gate_up_fp4_fits(const Context& context, const GateUp& a);
/// Whether they choose experts themselves: answers of up to kFewStepRows rows. The same for any of these.
bool gate_up_fp4_chooses(const Context& context, const GateUp& a);
void gate_up_fp4(Context& context, const GateUp& a, bool chooses);
/// The sums of prompts (gemm.h): up to kMaxFp4Rows rows.
void gate_up_fp4_prompt(Context& context, const GateUp& a);

/// False: too little shared memory; nothing was done.
bool down_fp4(Context& context, const Down& a);
/// Terms of a prompt step in BF16, as gemm_down and gemm make them.
bool down_fp4_prompt_terms(Context& context, const Down& a);

}  // namespace quern::cuda::moe
