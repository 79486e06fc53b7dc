// gate_up_fp4_one.cu for gate_up_fp4.cu.
#pragma once

#include "ggml-like/cuda/moe/moe.h"

namespace quern::cuda::moe {

/// One row: routed, shared_out, and the results of the choice.
void launch_gate_up_one(Context& c, const GateUp& a);

}  // namespace quern::cuda::moe
