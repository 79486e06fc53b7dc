// all_reduce: y = the sum of x over all ranks that run the model together, added in the order of the ranks
//
// x F32 [T, D] -> y F32 [T, D], contiguous, on every rank with the same bits. FP32; a number's bits depend only on
// that number of each rank. Every rank runs the same nodes of this op in the same order (communicator.h); on a
// backend that belongs to no ranks it throws Error.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

/// inputs {x}; outputs {y}.
extern const Op kAllReduce;

Tensor* all_reduce(Graph& g, std::string_view name, Tensor* x);

}  // namespace quern
