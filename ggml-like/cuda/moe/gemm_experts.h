// Matrix products of chosen experts with rows of prompts: linear/gemm.h's, grouped by expert.
//
// A pair is a row t and its j-th choice: p = t * used + j. groups (ops/moe_gate_up.h) is in device memory. Activations
// are BF16, sums FP32, with one rounding at the store; a row has the same bits however many rows there are. Throws
// Error(device) if the card has too little shared memory.
#pragma once

#include "ggml-like/cuda/linear/gemm.h"

namespace quern::cuda::moe {

using namespace pack;
using namespace linear;

/// The shared expert's product, made beside those of chosen experts where goes_along says so. Row n of x [tokens, cols] makes
/// row n of y.
struct Along {
    const Packed* w = nullptr;  // null: none
    const void* x = nullptr;
    void* y = nullptr;
    int64_t ldy = 0;
};
/// Whether the shared expert's matrix is of the experts' shape and format, and the kernel for so many rows takes it along.
bool goes_along(const Context& context, const PackedExperts& w, const Packed& shared, int tokens, int used);

/// Whether products of so many rows with w take `grouped` instead of h.
bool takes_grouped(const Context& context, const PackedExperts& w, int tokens, int used);

/// grouped[places[p]] = h[t] for every pair: BF16, rows of `columns` numbers, a multiple of 8. What comes next begins only once ids,
/// groups and factors are complete, so that products may read them before their wait.
void group_rows(Context& context, const bf16* h, int columns, int rows, int used, const int* places,
                bf16* grouped);

/// w in paired order. For every pair p of expert e, of which groups has number i of the pairs: routed[i] = silu(gate_e h[t]) * (up_e h[t]).
/// h BF16 [tokens, cols], or grouped [tokens * used, cols] where it is taken, without the norm's factor, which `scale` gives; routed BF16
/// [tokens * used, F].
void gemm_gate_up(Context& context, const PackedExperts& w, const void* h, const RowScale& scale,
                  const int* groups, int tokens, int used, void* routed, const Along& along);

/// For every pair p of expert e, number i of groups: terms[t * (used + 1) + j] = down_e routed[i], BF16 [tokens * (used + 1), rows].
void gemm_down(Context& context, const PackedExperts& w, const void* routed, const int* groups, int tokens,
               int used, void* terms, const Along& along);

}  // namespace quern::cuda::moe
