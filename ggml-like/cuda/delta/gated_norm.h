// The gated norm of many rows, written to memory for the tiled products.
#pragma once

#include "ggml-like/cuda/context.h"

namespace quern::cuda::delta {

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

}  // namespace quern::cuda::delta
