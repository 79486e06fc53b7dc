// The kernels behind conv_gated_delta_net. Shapes and formulas: ops/conv_gated_delta_net.h.
#pragma once

#include "ggml-like/cuda/context.h"

namespace quern::cuda::delta {

/// Entries of rows that wait to be committed; `k` is null without a journal.
struct DeltaJournal {
    float* k;               // [slots, entries, nk, dk]
    float* u;               // [slots, entries, nv, dv]
    float* g;               // [slots, entries, nv]
    const int* committed;   // [S] entries to apply first
    const int* journaling;  // [S] 1: rows write entries and leave S alone
    int entries;
};

struct DeltaStep {
    const void* u;  // BF16 [T, C], rows u_ld apart
    int64_t u_ld;
    const void *a, *b;  // BF16 [T, nv], rows ab_ld apart
    int64_t ab_ld;
    const float *conv, *decay_rate, *dt_bias;
    const int *positions, *start, *slots;
    void* conv_state;  // BF16 [slots, ring, C]
    float* delta;      // [slots, nv, dv, dk]
    DeltaJournal journal;
    const void* z;  // BF16 [T, nv, dv], rows z_ld apart
    int64_t z_ld;
    const float* norm;
    float eps;
    void* y;  // BF16 [T, nv * dv]
    void* o;  // BF16 [T, nv, dv], before norm and gate
    void* x;  // BF16 [T, C], work space
    void* work;
    unsigned* counters;
    int tokens, sequences, key_heads, value_heads, key_dim, value_dim, taps, ring;
};

/// Answer rows, one or several a sequence, heads of 128 x 128, 4 taps: y.
void delta_decode(Context& context, const DeltaStep& step);
/// Prompt rows, heads of 128 x 128, 4 taps, u_ld a multiple of 8: o, in chunks of 64 rows on tensor cores.
/// S has been committed.
void delta_prefill(Context& context, const DeltaStep& step);
/// Any rows, any shape: o, row by row, for small models.
void delta_generic(Context& context, const DeltaStep& step);
/// Applies the journal's committed entries to S, and zeroes S where a sequence begins. For rows that journal
/// copies S to `work` [S, nv, dv, dk].
void delta_commit(Context& context, const DeltaStep& step);

}  // namespace quern::cuda::delta
