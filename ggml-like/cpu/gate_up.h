// silu(gate x) * (up x) on the CPU: what norm_gate_up and moe_gate_up share.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml-like/cpu/context.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/tensor.h"
#include "ggml-like/weight.h"

namespace quern::cpu {

/// One pair {gate [F, D], up [F, D]} and the rows of x it gets: the result of row i goes to elements
/// [to[i], to[i] + F) of `out`.
struct GateUp {
    const Weight* weight = nullptr;
    ActivationRows x;
    std::vector<float> factor;  // of each row, for both of its sums
    const Tensor* out = nullptr;
    std::vector<int64_t> to;
};

/// Both products in FP32 as in weight_rows, times the row's factor; silu and the product of the two in FP32; one
/// rounding.
void gate_up(const std::vector<GateUp>& pairs, Context& context);

}  // namespace quern::cpu
