// linear_bias: y = f(x W^T + bias) + add, with f one of three functions
//
// x [N, K] F32 or BF16, W [M, K] of a dense format, bias F32 [M], add F32 [N, M] or none -> y [N, M] in `output`.
//   none       f(v) = v
//   gelu_tanh  f(v) = v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3)))
//   gelu_erf   f(v) = v/2 (1 + erf(v / sqrt 2))
// FP32, one rounding. A row's bits do not depend on the other rows. Source: Hendrycks and Gimpel 2016 (GELU).
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

enum class Activation : uint8_t { none, gelu_tanh, gelu_erf };

struct LinearBiasParams {
    const Weight* weight;
    Activation activation;
};

/// inputs {x, bias} and, if there is one, add; outputs {y}.
extern const Op kLinearBias;

/// `to`: a tensor for y, of that shape and dtype, which is none of the inputs; null: scratch.
Tensor* linear_bias(Graph& g, std::string_view name, Tensor* x, const Weight& weight, Tensor* bias,
                    Activation activation, Tensor* add, DType output, Tensor* to = nullptr);

}  // namespace quern
