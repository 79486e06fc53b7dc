// conv_gated_delta_net on the GPU: one row a sequence, chunks of rows, or row by row for shapes of small models.
#include "ggml-like/ops/conv_gated_delta_net.h"

#include "ggml-like/cuda/delta.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

void conv_gated_delta_net(const Node& node, Context& c) {
    const Tensor &u = *node.inputs[0], &a = *node.inputs[1], &b = *node.inputs[2];
    const Tensor &conv_state = *node.state[0], &delta = *node.state[1];
    const auto& p = node.params<ConvGatedDeltaNetParams>();
    if (node.state.size() > 2) unsupported("conv_gated_delta_net", "a journal");
    const DeltaStep step{.u = u.data,
                         .u_ld = u.stride[0],
                         .a = a.data,
                         .b = b.data,
                         .ab_ld = a.stride[0],
                         .conv = node.inputs[3]->as<float>(),
                         .decay_rate = node.inputs[4]->as<float>(),
                         .dt_bias = node.inputs[5]->as<float>(),
                         .positions = node.inputs[6]->as<int>(),
                         .start = node.inputs[7]->as<int>(),
                         .slots = node.inputs[8]->as<int>(),
                         .conv_state = conv_state.data,
                         .delta = delta.as<float>(),
                         .o = node.outputs[0]->data,
                         .x = node.outputs[1]->data,
                         .work = node.outputs[2]->data,
                         .tokens = static_cast<int>(u.shape[0]),
                         .sequences = static_cast<int>(node.inputs[8]->shape[0]),
                         .key_heads = p.key_heads,
                         .value_heads = p.value_heads,
                         .key_dim = p.key_dim,
                         .value_dim = p.value_dim,
                         .taps = static_cast<int>(node.inputs[3]->shape[1]),
                         .ring = static_cast<int>(conv_state.shape[1])};
    const bool real = p.key_dim == 128 && p.value_dim == 128 && step.taps == 4 && step.u_ld % 8 == 0;
    if (!real) return delta_generic(c, step);
    if (step.tokens == 1 || step.sequences > 1) delta_decode(c, step);
    if (step.tokens > step.sequences) delta_prefill(c, step);
}

}  // namespace quern::cuda
