// The kernels behind conv_gated_delta_net. Shapes and formulas: ops/conv_gated_delta_net.h.
#pragma once

#include "ggml-like/cuda/context.h"

namespace quern::cuda {

struct DeltaStep {
    const void* u;  // BF16 [T, C], rows u_ld apart
    int64_t u_ld;
    const void *a, *b;  // BF16 [T, nv], rows ab_ld apart
    int64_t ab_ld;
    const float *conv, *decay_rate, *dt_bias;
    const int *positions, *start, *slots;
    void* conv_state;  // BF16 [slots, ring, C]
    float* delta;      // [slots, nv, dv, dk]
    const void* z;     // BF16 [T, nv, dv], rows z_ld apart
    int64_t z_ld;
    const float* norm;
    float eps;
    void* y;  // BF16 [T, nv * dv]
    void* o;  // BF16 [T, nv, dv], before norm and gate; delta_decode: null if nobody wants it
    void* x;  // BF16 [T, C], work space
    void* work;
    int tokens, sequences, key_heads, value_heads, key_dim, value_dim, taps, ring;
};

/// The sequences with one row, heads of 128 x 128, 4 taps: y, and o.
void delta_decode(Context& context, const DeltaStep& step);
/// The sequences with more rows, heads of 128 x 128, 4 taps, u_ld a multiple of 8: o, in chunks of 64 rows on
/// tensor cores.
void delta_prefill(Context& context, const DeltaStep& step);
/// Any rows, any shape: o, row by row, for small models.
void delta_generic(Context& context, const DeltaStep& step);

}  // namespace quern::cuda
