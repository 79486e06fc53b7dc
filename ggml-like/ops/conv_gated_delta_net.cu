// conv_gated_delta_net on the GPU: answer rows, chunks of prompt rows, or row by row for shapes of small
// models.
#include "ggml-like/ops/conv_gated_delta_net.h"

#include "ggml-like/cuda/delta/chunks.h"
#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/delta/gated_norm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace delta;

namespace {

static_assert(delta::DeltaJournal::kMaxEntries == kMaxJournalEntries);

DeltaJournal journal_of(const Node& node) {
    if (node.state.size() <= 2) return {};
    return {
        .k = node.state[2]->as<float>(),
        .u = node.state[3]->as<float>(),
        .g = node.state[4]->as<float>(),
        .committed = node.inputs[9]->as<int>(),
        .journaling = node.params<ConvGatedDeltaNetParams>().drafts ? node.inputs[10]->as<int>() : nullptr,
        .entries = static_cast<int>(node.state[2]->shape[1])};
}

}  // namespace

void conv_gated_delta_net(const Node& node, Context& c) {
    const Tensor &u = *node.inputs[0], &a = *node.inputs[1], &b = *node.inputs[2];
    const Tensor &conv_state = *node.state[0], &delta = *node.state[1];
    const auto& p = node.params<ConvGatedDeltaNetParams>();
    const Tensor& z = *node.inputs[11];
    const int tokens = static_cast<int>(u.shape[0]), sequences = static_cast<int>(node.inputs[8]->shape[0]);
    const int taps = static_cast<int>(node.inputs[3]->shape[1]);
    const bool large = has_chunked_heads(p.key_dim, p.value_dim),
               fast = large && taps == 4 && u.stride[0] % 8 == 0;
    if (large && !fast && node.state.size() > 2)
        unsupported(
            "conv_gated_delta_net",
            "a journal (drafts) for a convolution of other than 4 taps or rows of no multiple of 16 bytes");
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
                         .journal = journal_of(node),
                         .z = z.data,
                         .z_ld = z.stride[0],
                         .norm = node.inputs[12]->as<float>(),
                         .eps = p.eps,
                         .y = node.outputs[0]->data,
                         .o = node.outputs[1]->data,
                         .x = node.outputs[2]->data,
                         .work = node.outputs[3]->data,
                         .told = node.outputs.size() > 4 ? node.outputs[4]->as<int>() : nullptr,
                         .counters = c.counters,
                         .tokens = tokens,
                         .sequences = sequences,
                         .key_heads = p.key_heads,
                         .value_heads = p.value_heads,
                         .key_dim = p.key_dim,
                         .value_dim = p.value_dim,
                         .taps = taps,
                         .ring = static_cast<int>(conv_state.shape[1])};
    if (fast && p.kind == StepKind::answer) return delta_decode(c, step);
    if (fast) {
        if (step.journal.k != nullptr) delta_commit(c, step);
        delta_prefill(c, step);
    } else {
        delta_generic(c, step);
    }
    gated_norm_rows(
        c, {step.o, step.z, step.z_ld, step.norm, tokens, p.value_heads, p.value_dim, p.eps, step.y});
}

}  // namespace quern::cuda
