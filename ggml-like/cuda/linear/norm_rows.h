// Products of packed weights with 1 to 8 rows of an answer step, in BF16 and not paired 16, whose norm was deferred: norm_linear's
// and norm_gate_up's.
#pragma once

#include "ggml-like/cuda/linear/step_product.h"

namespace quern::cuda::linear {

/// `part` of w by dense_rows.cuh, paired or not; out has no residual. what: the launch's name.
void norm_rows(Context& context, const char* what, const Part& part, const Packed& w, const StepRows& x,
               const StepOutput& out);

}  // namespace quern::cuda::linear
