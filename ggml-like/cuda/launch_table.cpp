#include "ggml-like/cuda/launch_table.h"

#include <map>

#include "ggml-like/check.h"
#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/vision_ops.h"
#include "ggml-like/ops/accept_drafts.h"
#include "ggml-like/ops/all_reduce_add.h"
#include "ggml-like/ops/arrived_rows.h"
#include "ggml-like/ops/best_token.h"
#include "ggml-like/ops/block_attention.h"
#include "ggml-like/ops/concat.h"
#include "ggml-like/ops/conv_gated_delta_net.h"
#include "ggml-like/ops/draft_token.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/follow_choice.h"
#include "ggml-like/ops/follow_draft.h"
#include "ggml-like/ops/gated_attention.h"
#include "ggml-like/ops/gather_rows.h"
#include "ggml-like/ops/grid_attention.h"
#include "ggml-like/ops/kv_write.h"
#include "ggml-like/ops/layer_norm.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/linear_bias.h"
#include "ggml-like/ops/logits_top.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"
#include "ggml-like/ops/mtp_rows.h"
#include "ggml-like/ops/norm_gate_up.h"
#include "ggml-like/ops/norm_linear.h"
#include "ggml-like/ops/patches.h"
#include "ggml-like/ops/write_ring.h"

namespace quern::cuda {
namespace {

void launch_nothing(const Node&, Context&) {}

}  // namespace

Launch launch_of(const Op* op) {
    static const std::map<const Op*, Launch> kTable{
        {&kArrivedRows, launch_nothing},
        {&kEmbed, embed},
        {&kNormLinear, norm_linear},
        {&kNormGateUp, norm_gate_up},
        {&kLinearAdd, linear_add},
        {&kConvGatedDeltaNet, conv_gated_delta_net},
        {&kGatedAttention, gated_attention},
        {&kMoeGateUp, moe_gate_up},
        {&kMoeDown, moe_down},
        {&kAllReduceAdd, all_reduce_add},
        {&kGatherRows, gather_rows},
        {&kConcat, concat},
        {&kKvWrite, kv_write},
        {&kBlockAttention, block_attention},
        {&kLogitsTop, logits_top},
        {&kBestToken, best_token},
        {&kDraftToken, draft_token},
        {&kMtpRows, mtp_rows},
        {&kWriteRing, write_ring},
        {&kAcceptDrafts, accept_drafts},
        {&kFollowChoice, follow_choice},
        {&kFollowDraft, follow_draft},
        {&kLayerNorm, layer_norm},
        {&kLinearBias, linear_bias},
        {&kPatchValues, patch_values},
        {&kGridEmbedding, grid_embedding},
        {&kGridAttention, grid_attention},
    };
    const auto it = kTable.find(op);
    if (it == kTable.end()) FAIL(device, "[{}] has no GPU kernel", op->name);
    return it->second;
}

}  // namespace quern::cuda
