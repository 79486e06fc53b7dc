// Attention as the kernels see it: plain pointers, strides in elements. ops/gated_attention.h has shapes and formulas,
// ops/gated_attention.cu fills AttentionCall from a node.
//
// q, gate, k, v and y are BF16, caches BF16 or packed (kv_format.h). Norms, rotation, scores, softmax and sums are FP32; q and k are rounded to BF16
// after the rotation, probabilities before they meet the values, y once at the end.
#pragma once

#include "ggml-like/cuda/attention/split.h"
#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/kv_format.h"

namespace quern::cuda::attention {

using namespace ptx;

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kKeysPerPage = 64;
inline constexpr int kScales = 16;  // scales of KV heads that a call has room for

/// Heads of rows: element (t, h, 0) is at data + t * row + h * head.
struct HeadRows {
    const bf16* data;
    int64_t row, head;

    __device__ const bf16* at(int t, int h) const { return data + t * row + h * head; }
};

/// T rows, H query heads, G KV heads, d = head_dim, R = rotary_dims.
struct AttentionCall {
    HeadRows q, gate, k, v;
    const float *q_norm, *k_norm;                         // [d]
    const int *positions, *row_sequence, *start, *pages;  // ops/batch.h
    const int* from;                        // [sequences] the first row of each whose y is wanted
    const int* rope;                        // ops/batch.h, or null
    int rope_row, row_pairs, column_pairs;  // from one axis to the next; pairs of the second and third axis
    int64_t cache_pages;                    // that a cache has
    int64_t page_row;                       // from one sequence's page table to the next, in entries
    bf16 *k_cache, *v_cache;                // [pages, G, 64, d]; of packed caches the first block
    bf16 *y, *rotated;                      // [T, H, d]; rotated: of prompts, and where generic
    void* work;                             // attention_work_bytes (ops/gated_attention.h)
    unsigned* counters;                     // Context::counters
    int tokens, sequences, heads, kv_heads, head_dim, rotary_dims;
    int rows;           // whose y is wanted, at most
    int max_keys;       // that a page table has room for
    bool answers;       // an answer step; else a prompt step
    int unpacked_room;  // pages of a prompt step over packed caches that work has room for, in BF16
    bool unpacked;      // the caches are what attention_unpack has left (unpacked.cuh)
    float eps;
    kv::Packing k_packing, v_packing;          // both plain, or neither
    kv::Layout k_layout, v_layout;             // of packed rows
    float k_scale[kScales], v_scale[kScales];  // of each KV head; 0: from the values
    // [R/2] the angle of position 1 in turns * 2^64; times a position, modulo 2^64, it is the phase there.
    uint64_t turns[kMaxHeadDim / 2];
};

/// Fills call.turns: theta^(-2i/R) / 2 pi.
void set_turns(AttentionCall& call, double theta);

/// Launches the kernels that the shape and the kind of step need. Throws Error(device) where no kernel takes the shape.
void attend(const AttentionCall& call, Context& context);

// What attend() launches; tests call it directly.

/// Writes rotated, the normed and rotated q of rows whose y is wanted, and puts k (normed and rotated) and v into the cache.
void attention_prepare(const AttentionCall& call, Context& context);
/// The same for packed caches; with keys in tq4 rotated is also multiplied by H.
void attention_prepare_packed(const AttentionCall& call, Context& context);
/// Prompts, after attention_prepare_packed: the pages of all sequences of the step in BF16, in call.work, if they fit there.
void attention_unpack(const AttentionCall& call, Context& context);
/// Answers: y, and k and v to the cache; needs no attention_prepare. Throws beyond max_answer_rows.
void attention_decode(const AttentionCall& call, Context& context);
/// The same, with the same bits as long as values are finite, where sequences have several rows.
void attention_decode_rows(const AttentionCall& call, Context& context);
/// As attention_decode, over packed caches.
void attention_decode_packed(const AttentionCall& call, Context& context);
/// Prompts, after attention_prepare: y; by products of warpgroups where the card has them (variants.h).
void attention_prefill_warpgroups(const AttentionCall& call, Context& context);
void attention_prefill(const AttentionCall& call, Context& context);
/// Any shape, kind of step and cache, after attention_prepare or attention_prepare_packed: y.
void attention_generic(const AttentionCall& call, Context& context);

}  // namespace quern::cuda::attention
