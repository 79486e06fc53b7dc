// Attention of blocks of rows (ops/block_attention.h) as its kernels see it.
#pragma once

#include "ggml-like/cuda/attention/attention.h"
#include "ggml-like/cuda/attention/rotate_heads.cuh"

namespace quern::cuda::attention {

inline constexpr int kMaxBlockParts = 32;  // BlockCall::splits at most

struct BlockCall {
    HeadRows q, k, v;
    const float *q_norm, *k_norm;                         // [d]
    const int *positions, *row_sequence, *start, *pages;  // ops/batch.h
    int64_t page_row;
    const bf16 *k_cache, *v_cache;  // [pages, C, 64, d]
    int cache_heads, first_head;
    bf16 *y, *rotated_q, *rotated_k;  // [T, H, d], [T, H, d], [T, G, d]
    float* work;                      // [splits, T, H, d + 2]
    int tokens, sequences, heads, kv_heads, head_dim, splits;
    int window;  // 0: none
    bool causal;
    float eps;
    HeadTurns turns;
};

/// Launches three kernels. Throws Error(device) for head sizes other than 64 and 128.
void block_attend(const BlockCall& call, Context& context);

}  // namespace quern::cuda::attention
