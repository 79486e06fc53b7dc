// Which function launches an op's kernels. A new op: a line in launch_table.cpp.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/graph.h"

namespace quern::cuda {

using Launch = void (*)(const Node&, Context&);

/// Throws Error(device) for an op without a kernel.
Launch launch_of(const Op* op);

}  // namespace quern::cuda
