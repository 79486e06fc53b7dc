// Attention as the kernels see it: plain pointers and strides (in elements). ops/gated_attention.cu fills it
// from a node.
#pragma once

#include "ggml-like/cuda/attention/split.h"
#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::attention {

using namespace ptx;

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kKeysPerPage = 64;

/// Heads of rows: element (t, h, 0) is at data + t * row + h * head.
struct HeadRows {
    const bf16* data;
    int64_t row, head;

    __device__ const bf16* at(int t, int h) const { return data + t * row + h * head; }
};

struct AttentionCall {
    HeadRows q, gate, k, v;
    const float *q_norm, *k_norm;                         // [d]
    const int *positions, *row_sequence, *start, *pages;  // ops/batch.h
    int64_t page_row;                                     // entries between two sequences' page tables
    bf16 *k_cache, *v_cache;                              // [pages, G, 64, d]
    bf16 *y, *rotated;                                    // [T, H, d]
    void* work;                                           // attention_work_bytes
    unsigned* counters;
    int tokens, sequences, heads, kv_heads, head_dim, rotary_dims;
    int max_keys;  // that a page table has room for
    bool answers;  // rows of answers; else of prompts
    float eps;
    // [R/2] angle of position 1 in turns * 2^64: any position keeps its phase.
    uint64_t turns[kMaxHeadDim / 2];
};

/// Fills call.turns: theta^(-2i/R) / 2 pi.
void set_turns(AttentionCall& call, double theta);

/// Picks the kernels and launches them.
void attend(const AttentionCall& call, Context& context);

// The parts, for attend() and tests.
bool has_fast_shape(const AttentionCall& call);
void attention_prepare(const AttentionCall& call, Context& context);  // rotated, and k', v to the cache
void attention_decode(const AttentionCall& call, Context& context);   // does without attention_prepare
void attention_prefill(const AttentionCall& call, Context& context);
void attention_generic(const AttentionCall& call, Context& context);

}  // namespace quern::cuda::attention
