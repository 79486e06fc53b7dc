// Norms of many rows, written to memory for the tiled products.
#pragma once

#include "ggml-like/cuda/context.h"

namespace quern::cuda {

/// h BF16 [rows, columns] = rms_norm(x F32 [rows, columns], norm).
void norm_rows(Context& context, const float* x, const float* norm, int rows, int columns, float eps,
               void* h);

struct GatedNormRows {
    const void* o;  // BF16 [rows, heads, dim]
    const void* z;  // BF16, rows z_ld apart, heads dim apart
    int64_t z_ld;
    const float* norm;  // [dim]
    int rows, heads, dim;
    float eps;
    void* h;  // BF16 [rows, heads * dim]
};

/// h = rms_norm(o, norm) * silu(z) per head.
void gated_norm_rows(Context& context, const GatedNormRows& a);

}  // namespace quern::cuda
