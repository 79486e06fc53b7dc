// block_attention on the GPU: reads the node; the kernels are in cuda/attention/block.cu.
#include "ggml-like/ops/block_attention.h"

#include "ggml-like/cuda/attention/block.h"
#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda {

using namespace ptx;
using namespace attention;

namespace {

constexpr const char* kName = "block_attention";
static_assert(kMaxBlockSplits <= kMaxBlockParts);

HeadRows head_rows(const Tensor& x) {
    if (x.dtype != DType::BF16) unsupported(kName, "activations other than BF16");
    if (x.stride[2] != 1 || x.stride[0] % 8 != 0 || x.stride[1] % 8 != 0 ||
        reinterpret_cast<uintptr_t>(x.data) % 16 != 0)
        unsupported(kName, "rows that do not start at multiples of 16 bytes");
    return {x.as<const bf16>(), x.stride[0], x.stride[1]};
}

const bf16* cache(const Tensor& x) {
    if (x.dtype != DType::BF16 || !x.contiguous())
        unsupported(kName, "a cache that is not BF16 [pages, C, 64, d]");
    return x.as<const bf16>();
}

}  // namespace

void block_attention(const Node& node, Context& context) {
    const auto& in = node.inputs;
    const auto& p = node.params<BlockAttentionParams>();
    BlockCall c{};
    c.q = head_rows(*in[0]), c.k = head_rows(*in[1]), c.v = head_rows(*in[2]);
    c.q_norm = in[3]->as<const float>(), c.k_norm = in[4]->as<const float>();
    c.positions = in[5]->as<const int>(), c.row_sequence = in[6]->as<const int>(),
    c.start = in[7]->as<const int>();
    c.pages = in[8]->as<const int>(), c.page_row = in[8]->stride[0];
    c.k_cache = cache(*node.state[0]), c.v_cache = cache(*node.state[1]);
    c.cache_heads = static_cast<int>(node.state[0]->shape[1]), c.first_head = static_cast<int>(p.first_head);
    c.y = node.outputs[0]->as<bf16>(), c.rotated_q = node.outputs[1]->as<bf16>();
    c.rotated_k = node.outputs[2]->as<bf16>(), c.work = node.outputs[3]->as<float>();
    c.tokens = static_cast<int>(in[0]->shape[0]), c.heads = static_cast<int>(in[0]->shape[1]);
    c.kv_heads = static_cast<int>(in[1]->shape[1]), c.head_dim = static_cast<int>(in[0]->shape[2]);
    c.sequences = static_cast<int>(in[7]->shape[0]) - 1;
    c.splits = static_cast<int>(block_attention_splits(c.sequences, c.kv_heads));
    c.window = static_cast<int>(p.window), c.causal = p.causal, c.eps = p.eps;
    if (p.rotary.dims() != c.head_dim) unsupported(kName, "heads that are rotated in part");
    set_head_turns(c.turns, p.rotary.frequency.data(), c.head_dim / 2, p.rotary.scale);
    block_attend(c, context);
}

}  // namespace quern::cuda
