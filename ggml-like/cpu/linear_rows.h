// The matrix product behind the linear ops on the CPU.
#pragma once

#include <functional>

#include "ggml-like/cpu/context.h"
#include "ggml-like/weight.h"

namespace quern::cpu {

/// y[t * ldy + n] = (x W^T)[t][n] as plain floats, unrounded. The order of a sum depends on the width only,
/// so a row has the same bits alone or in a batch. Uses context buffers 0 and 1.
void linear_rows(const Tensor& x, const Weight& w, float* y, int64_t ldy, Context& context);

/// Calls store(t, row) with the N sums of each row t, which it may change. Uses context buffers 0, 1 and 2.
void linear(const Tensor& x, const Weight& w, Context& context,
            const std::function<void(int64_t t, float* row)>& store);

}  // namespace quern::cpu
