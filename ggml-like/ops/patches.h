// Patches of images, and where they are.
//
// patch_values: y = (x - 127.5) / 127.5, x U8 [N, K] -> y [N, K] in `activation`; FP32, one rounding.
//
// grid_embedding: what a table of positions says for each patch. place I32 [N, 4]: row and column of the patch, height and width of
// its grid, in patches; table F32 [S*S, D], row S*y + x -> y F32 [N, D]. The grid's corners are the table's corners; between
// the table's rows it is bilinear: s = i * (S - 1) / max(n - 1, 1), f = floor(s), d = s - f, and so on. FP32.
// Source: HF transformers, Qwen3-VL (fast_pos_embed_interpolate).
#pragma once

#include "ggml-like/graph.h"

namespace quern {

/// inputs {x}; outputs {y}.
extern const Op kPatchValues;
/// inputs {place, table}; outputs {y}.
extern const Op kGridEmbedding;

Tensor* patch_values(Graph& g, std::string_view name, Tensor* x, DType activation);
Tensor* grid_embedding(Graph& g, std::string_view name, Tensor* place, Tensor* table);

}  // namespace quern
