// As cuda/ops.h, of the ops that only drafters use.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/op.h"

namespace quern::cuda {

void draft_token(const Node& node, Context& context);
void mtp_rows(const Node& node, Context& context);
void concat(const Node& node, Context& context);
void kv_write(const Node& node, Context& context);
void block_attention(const Node& node, Context& context);
void accept_drafts(const Node& node, Context& context);
void follow_choice(const Node& node, Context& context);
void follow_draft(const Node& node, Context& context);

}  // namespace quern::cuda
