// The gated norm of many rows, for the product that follows. All tensors are BF16, weights FP32; one rounding at the
// store.
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

/// h = rms_norm(o, norm) * silu(z), head by head (ops/conv_gated_delta_net.h). Throws Error(device) for heads of more
/// than 256, for 2^20 rows or more, and where rows * heads is 2^24 or more.
void gated_norm_rows(Context& context, const GatedNormRows& a);

}  // namespace quern::cuda::delta
