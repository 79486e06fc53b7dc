// The kernels' host side, one function an op: reads shapes from the node, picks a variant, launches. Defined
// in ops/<op>.cu.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/op.h"

namespace quern::cuda {

void embed(const Node& node, Context& context);
void norm_linear(const Node& node, Context& context);
void norm_gate_up(const Node& node, Context& context);
void linear_add(const Node& node, Context& context);
void conv_gated_delta_net(const Node& node, Context& context);
void gated_attention(const Node& node, Context& context);
void moe_gate_up(const Node& node, Context& context);
void moe_down(const Node& node, Context& context);
void all_reduce_add(const Node& node, Context& context);
void gather_rows(const Node& node, Context& context);
void logits_top(const Node& node, Context& context);
void best_token(const Node& node, Context& context);
void write_ring(const Node& node, Context& context);

}  // namespace quern::cuda
