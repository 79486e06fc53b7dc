// Small functions that several CPU ops share. Plain loops in a fixed order, which defines the rounding.
#pragma once

#include <cmath>
#include <cstdint>

#include "ggml-like/tensor.h"

namespace quern::cpu {

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

/// 1 / sqrt(mean(x^2) + eps)
inline float inverse_rms(const float* x, int64_t n, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
}

/// Bytes of a tensor's elements, views counted without their gaps.
inline double dense_bytes(const Tensor& t) { return static_cast<double>(dtype_bytes(t.dtype, t.elements())); }

}  // namespace quern::cpu
