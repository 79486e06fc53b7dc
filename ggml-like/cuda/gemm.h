// Matrix products of packed weights with many rows of activations (tensor cores, tiles in shared memory). Few
// rows (16 and less) go through few_rows.cuh instead.
//
// All activations are BF16, rows 16-byte aligned, ld in elements and a multiple of 8; columns beyond `cols`
// up to the next multiple of 64 may hold anything finite only if they exist in memory: reads past a row's
// `cols` are masked. Sums in FP32, one rounding at the store. Work is found from device memory; the host
// never waits.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/packed.h"

namespace quern::cuda {

struct GemmOutput {
    void* y;  // [tokens, ld]
    int64_t ld;
    bool f32;  // else BF16
    const float*
        residual;  // F32 [tokens, residual_ld], added before the store; or null. y may be the same memory.
    int64_t residual_ld;
};

/// y = x W^T (+ residual), all parts of w.
void gemm(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens, const GemmOutput& out);

/// w in paired order, F = rows / 2: y BF16 [tokens, ldy] = silu(gate x) * (up x).
void gemm_paired(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens, void* y,
                 int64_t ldy);

/// Grouped, paired order: for every pair p = t*used + j of expert e (groups: ops/moe_route.h, in device
/// memory) routed[p, 0..F) = silu(gate_e h[t]) * (up_e h[t]), BF16 [tokens*used, F], h [tokens, cols].
void gemm_gate_up(Context& context, const PackedExperts& w, const void* h, const int* groups, int tokens,
                  int used, void* routed);

/// Grouped: for every pair p of expert e: terms[(t*(used+1) + j), 0..rows) = down_e routed[p], BF16.
void gemm_down(Context& context, const PackedExperts& w, const void* routed, const int* groups, int tokens,
               int used, void* terms);

}  // namespace quern::cuda
