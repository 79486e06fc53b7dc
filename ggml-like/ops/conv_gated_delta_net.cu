// conv_gated_delta_net on the GPU: one row a sequence, chunks of rows, or row by row for shapes of small
// models.
#include "ggml-like/ops/conv_gated_delta_net.h"

#include "ggml-like/cuda/delta.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/norm_rows.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

void conv_gated_delta_net(const Node& node, Context& c) {
    const Tensor &u = *node.inputs[0], &a = *node.inputs[1], &b = *node.inputs[2];
    const Tensor &conv_state = *node.state[0], &delta = *node.state[1];
    const auto& p = node.params<ConvGatedDeltaNetParams>();
    if (node.state.size() > 2) unsupported("conv_gated_delta_net", "a journal");
    const Tensor& z = *node.inputs[11];
    const int tokens = static_cast<int>(u.shape[0]), sequences = static_cast<int>(node.inputs[8]->shape[0]);
    const int taps = static_cast<int>(node.inputs[3]->shape[1]);
    const bool real = p.key_dim == 128 && p.value_dim == 128 && taps == 4 && u.stride[0] % 8 == 0;
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
                         .z = z.data,
                         .z_ld = z.stride[0],
                         .norm = node.inputs[12]->as<float>(),
                         .eps = p.eps,
                         .y = node.outputs[0]->data,
                         .o = tokens > sequences || !real ? node.outputs[1]->data : nullptr,
                         .x = node.outputs[2]->data,
                         .work = node.outputs[3]->data,
                         .tokens = tokens,
                         .sequences = sequences,
                         .key_heads = p.key_heads,
                         .value_heads = p.value_heads,
                         .key_dim = p.key_dim,
                         .value_dim = p.value_dim,
                         .taps = taps,
                         .ring = static_cast<int>(conv_state.shape[1])};
    if (real && (tokens == 1 || sequences > 1)) delta_decode(c, step);
    if (real && tokens > sequences) delta_prefill(c, step);
    if (!real) delta_generic(c, step);
    if (step.o != nullptr)
        gated_norm_rows(
            c, {step.o, step.z, step.z_ld, step.norm, tokens, p.value_heads, p.value_dim, p.eps, step.y});
}

}  // namespace quern::cuda
