// all_reduce on the GPU: cuda/comm/all_reduce.cu.
#include "ggml-like/ops/all_reduce.h"

#include "ggml-like/cuda/comm/all_reduce.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

void all_reduce(const Node& node, Context& c) {
    const Tensor& x = *node.inputs[0];
    comm::all_reduce(c, x.as<float>(), node.outputs[0]->as<float>(), x.elements());
}

}  // namespace quern::cuda
