// As cuda/ops.h, of the ops that only vision towers use.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/op.h"

namespace quern::cuda {

void layer_norm(const Node& node, Context& context);
void linear_bias(const Node& node, Context& context);
void patch_values(const Node& node, Context& context);
void grid_embedding(const Node& node, Context& context);
void grid_attention(const Node& node, Context& context);

}  // namespace quern::cuda
