// The kernels of conv_gated_delta_net. Shapes and formulas: ops/conv_gated_delta_net.h.
//
// Letters: T rows, S sequences, nk key heads of dk, nv value heads of dv, C = 2 nk dk + nv dv channels, ring rows of
// the convolution's state. S, journal, gates and sums are FP32; x, o and y are rounded to BF16 once each. All functions
// launch on context.stream and throw Error(device) for shapes that they do not take.
#pragma once

#include "ggml-like/cuda/context.h"

namespace quern::cuda::delta {

/// What rows that may still be taken back would do to the state: an entry each, which a later step applies or drops.
/// `k` is null without a journal.
struct DeltaJournal {
    float* k;               // [slots, entries, nk, dk]
    float* u;               // [slots, entries, nv, dv]
    float* g;               // [slots, entries, nv]
    const int* committed;   // [S] entries to apply first
    const int* journaling;  // [S] 1: rows write entries and leave S unchanged; null: none do
    int entries;            // kMaxEntries at most
    static constexpr int kMaxEntries = 16;

#ifdef __CUDACC__
    __device__ __forceinline__ bool journals(int sequence) const {
        return journaling != nullptr && journaling[sequence] != 0;
    }
#endif
};

struct DeltaStep {
    const void* u;  // BF16 [T, C], rows u_ld apart
    int64_t u_ld;
    const void *a, *b;  // BF16 [T, nv], rows ab_ld apart
    int64_t ab_ld;
    const float *conv, *decay_rate, *dt_bias;  // [C, taps], [nv], [nv]
    const int *positions, *start, *slots;      // ops/batch.h
    void* conv_state;                          // BF16 [slots, ring, C]
    float* delta;                              // [slots, nv, dv, dk]
    DeltaJournal journal;
    const void* z;  // BF16 [T, nv, dv], rows z_ld apart
    int64_t z_ld;
    const float* norm;  // [dv]
    float eps;
    void* y;     // BF16 [T, nv * dv]
    void* o;     // BF16 [T, nv, dv], before norm and gate
    void* x;     // BF16 [T, C], work space
    void* work;  // prompts: a Record for each chunk and value head; journal: copies of S (delta_commit)
    int* told;   // prompts in chunks: delta_told_counts, zeros before the run
    unsigned* counters;  // Context::counters
    int tokens, sequences, key_heads, value_heads, key_dim, value_dim, taps, ring;
};

/// Answer rows, one or several a sequence, heads of 128 x 128, 4 taps: y.
void delta_decode(Context& context, const DeltaStep& step);
/// Prompt rows, heads of 128 x 128, 4 taps, u_ld a multiple of 8: o, in chunks of 64 rows on tensor cores. The
/// journal's entries must have been applied (delta_commit).
void delta_prefill(Context& context, const DeltaStep& step);
/// Any rows, up to 8 taps and heads of 256: o, row by row, for small models.
void delta_generic(Context& context, const DeltaStep& step);
/// Applies the journal's committed entries to S, and zeroes S where a sequence begins. For a sequence that journals,
/// also copies S to `work` [S, nv, dv, dk].
void delta_commit(Context& context, const DeltaStep& step);

}  // namespace quern::cuda::delta
