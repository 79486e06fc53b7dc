// The gated delta rule over many rows, in chunks of 64. ops/conv_gated_delta_net.h is the contract.
#pragma once

#include <cstdint>

#include "ggml-like/cuda/context.h"

namespace quern::cuda {

/// Device pointers; heads are 128 wide, taps is 4, u_ld a multiple of 8, u and conv_state 16-byte aligned.
/// Steps with journal entries to apply or to write take another kernel.
struct DeltaPrefill {
    const void* u;  // BF16 [T, C]
    int64_t u_ld;   // row stride in elements
    const void* a;  // BF16 [T, nv]
    const void* b;
    int64_t ab_ld;
    const float* conv;
    const float* decay_rate;
    const float* dt_bias;
    const int* positions;
    const int* start;
    const int* slots;
    void* conv_state;          // BF16 [slots, W-1+J, C]
    int64_t conv_slot_stride;  // elements
    float* delta;              // [slots, nv, dv, dk]
    void* o;                   // BF16 [T, nv, dv]
    void* x;                   // BF16 [T, C] work: the convolution's output
    void* work;                // U8 [delta_prefill_work_bytes], 16-byte aligned
    int tokens;
    int sequences;
    int key_heads;
    int value_heads;
    int taps;
};

int64_t delta_prefill_work_bytes(int64_t tokens, int64_t sequences, int key_heads, int value_heads);

void delta_prefill(Context& context, const DeltaPrefill& p);

}  // namespace quern::cuda
