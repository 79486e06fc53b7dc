// The kernels of moe_gate_up and moe_down, and what they get to work with. Shapes and formulas: ops/moe_gate_up.h,
// ops/moe_down.h.
//
// Activations are BF16; sums, factors and weights of experts FP32; gate and up round once when they store, a prompt's
// terms too; y is FP32. Launches are on context.stream and throw Error(device).
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/moe/mixture_shapes.h"
#include "ggml-like/cuda/pack/packed.h"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// Logits of rows, without the norm's factor: F32, in answer steps fixed point (route_work.cuh); rows are `pitch`
/// apart.
struct Logits {
    const float* floats;  // null: `sums`
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
    int* places;  // in prompt steps and as_prompt, else null: [rows * used], where groups has each pair
    /// Zeros before the run, as many as told_words(rows, used). Of one row route.cuh's Chosen, the shared expert's gate last; of up
    /// to kFewStepRows rows choice_list.cuh's words, if no more than kMaxChoiceUsed experts are used. If ready_is_flag the first
    /// is a flag: all is complete. Null in prompt steps, and as_prompt.
    uint64_t* ready;
    float* factor;  // [rows] of the norm
    /// Scratch of steps of many rows, a byte for each 8 rows and expert (rounded up), or less.
    uint32_t* counts;
    int64_t counts_bytes;
};

/// Whether the first word of Choice::ready is a flag: of up to kFewStepRows rows it says nothing of groups, and beyond kGroupPairs
/// pairs nobody writes it.
inline bool ready_is_flag(int rows, int used) { return rows > kFewStepRows && rows * used <= kGroupPairs; }

/// ids, weights, shared_gate, groups and factor of all rows. Throws Error(device) for more than 512 experts or kMaxUsed
/// used ones.
void choose_experts(Context& context, const Choice& choice);

struct GateUp {
    PackedExperts experts;  // tiles = 0: none in this launch
    Part shared;            // tiles = 0: none in this launch
    int chunks;
    const bf16* h;  // [rows, columns]
    int columns;
    const int *ids, *groups;
    int rows, used;
    bf16 *routed, *shared_out;  // [rows * used, F], of prompts and as_prompt in groups' order; [rows, Fs]
    const float* factor;        // [rows] of the norm, for kernels that do not choose
    Choice choice;              // for kernels that choose
    /// [rows * (used + 1), fp4_row_bytes]: both once more, in the order of the places of choice_list.cuh, for down_fp4_few.cu; or null.
    uint8_t* permuted;
    int first_pair = 0;  // in groups, of the launch's rows
};

struct Down {
    PackedExperts experts;
    Part shared;
    int shared_chunks;
    const bf16 *routed, *shared_in;
    int width, shared_width;  // F, Fs: columns of routed [rows * used, F] and shared_in [rows, Fs]
    const int *ids, *groups;
    const float *weights, *shared_gate, *residual;
    int rows, used;
    float* y;
    int64_t ld;
    void* terms;  // [rows * (used + 1), D]: F32, in prompt steps and as_prompt BF16
    /// Choice::ready; null: the choice is complete when the predecessor has ended. Kernels that read groups take the flag alone. Those of
    /// prompts and as_prompt take neither: their gate and up, or group_rows before them, let their successors begin only after their own
    /// wait, so that ids, groups and factors are complete when the products of gate and up (expert_tour.cuh) and of moe_down begin, before
    /// these wait. Between two mixtures there is a choice, which waits: the tours of two moe_down share a counter.
    const uint64_t* ready;
    Defer next;                         // of the norm that follows
    const uint8_t* permuted = nullptr;  // GateUp::permuted, where it was written
    int first_pair = 0;                 // in groups, of the launch's rows
};

/// For the choice of a kernel (cuda/variants.h).
inline MixtureShape shape_of(const PackedExperts& experts, const Part& shared, int shared_chunks, int rows,
                             int used) {
    return {.experts_kind = experts.kind,
            .shared_kind = shared.kind,
            .rows = rows,
            .used = used,
            .experts = experts.count,
            .tiles = experts.tiles,
            .shared_tiles = shared.tiles,
            .chunks = experts.chunks,
            .shared_chunks = shared_chunks,
            .height = experts.rows};
}
inline MixtureShape shape_of(const GateUp& a) {
    return shape_of(a.experts, a.shared, a.chunks, a.rows, a.used);
}
inline MixtureShape shape_of(const Down& a) {
    return shape_of(a.experts, a.shared, a.shared_chunks, a.rows, a.used);
}

/// Whether the kernel of moe_gate_up also writes `permuted`, where the node has it.
inline bool leaves_permuted(const Card& card, const MixtureShape& gate_up) {
    return choose_gate_up(card, gate_up) == MixtureProduct::few;
}

/// NVFP4, an answer step, by `product`: one, few, choosing or stream. routed and shared_out; all but stream also choose experts.
void gate_up_fp4(Context& context, MixtureProduct product, const GateUp& a);
/// A prompt step of up to kMaxFp4Rows rows, with the sums of gemm.h.
void gate_up_fp4_prompt(Context& context, const GateUp& a);

/// NVFP4, an answer step, by `product`: one, few or stream. y, h and squares. peers: the sum of the terms is over ranks (down_sums);
/// or null.
void down_fp4(Context& context, MixtureProduct product, const Down& a, const comm::Peers* peers);
/// Terms of a prompt step, with the bits of gemm_down and gemm.
void down_fp4_prompt_terms(Context& context, const Down& a);

}  // namespace quern::cuda::moe
