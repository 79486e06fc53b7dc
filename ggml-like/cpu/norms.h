// The norms inside fused ops on the CPU. FP32, one rounding at the store.
#pragma once

#include "ggml-like/cpu/context.h"
#include "ggml-like/tensor.h"

namespace quern::cpu {

/// y [T, D] = x / sqrt(mean(x^2) + eps) * w
void rms_norm(const Tensor& x, const Tensor& w, float eps, const Tensor& y, Context& context);
/// y [T, n*d] = (x / sqrt(mean(x^2) + eps) * w) * silu(z), heads of x and z [T, n, d]
void gated_rms_norm(const Tensor& x, const Tensor& z, const Tensor& w, float eps, const Tensor& y,
                    Context& context);

}  // namespace quern::cpu
