// The launches of gate_up_fp4.cu's other kernels.
#pragma once

#include "ggml-like/cuda/moe/moe.h"

namespace quern::cuda::moe {

/// One row; 2 to kFewStepRows: routed, shared_out, and the results of the choice.
void launch_gate_up_one(Context& c, const GateUp& a);
void launch_gate_up_few(Context& c, const GateUp& a);

}  // namespace quern::cuda::moe
