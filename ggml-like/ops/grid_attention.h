// grid_attention: attention among all patches of a frame, positions by rotation in two dimensions
//
// qkv [N, 3 * H * d] (queries of all heads, keys, values), place I32 [N, 4] (row, column, and the grid's size, as in
// patches.h), start I32 [K + 1]: frame k owns rows start[k] .. start[k+1]-1 -> y [N, H * d] in qkv's dtype.
//   1. q and k: for j < d/2 the pair (j, j + d/2) rotates by angle[j] = row * theta^(-4j/d) for j < d/4, and by
//      column * theta^(-4(j - d/4)/d) from there on. The angle in FP64 on the CPU, FP32 on the GPU.
//   2. y = softmax(q k^T / sqrt(d)) v over all rows of the frame, without a mask; rows of other frames are never seen.
// d is a multiple of 4. Scores, softmax (maximum subtracted) and sums in FP32; one rounding to qkv's dtype. What goes into the
// products may be rounded to that dtype before. With `rows` > 0 only the queries of rows first .. first + rows - 1 are asked, y is
// [rows, H * d], and there is one frame. A row's bits depend on its frame alone. start[K] = N; no frame is empty.
// Source: HF transformers, Qwen3-VL vision attention.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

struct GridAttentionParams {
    int heads;
    float theta;
    int64_t first = 0, rows = 0;
};

/// inputs {qkv, place, start}; outputs {y, work}: work, kernel scratch, is U8 [grid_attention_work_bytes].
extern const Op kGridAttention;

/// Elements of a head in a device's scratch, which has rotated queries and keys with zeros beyond the head, or rotated keys and
/// values (cuda/attention/grid_warpgroups.cu).
inline constexpr int kGridHead = 80;

/// Kernel scratch of a device; none where activations are F32.
int64_t grid_attention_work_bytes(const Tensor& qkv, int heads);

Tensor* grid_attention(Graph& g, std::string_view name, Tensor* qkv, Tensor* place, Tensor* start,
                       const GridAttentionParams& params);

}  // namespace quern
