// gated_attention on the GPU: reads the node; the kernels are in cuda/attention*.cu.
#include "ggml-like/ops/gated_attention.h"

#include "ggml-like/cuda/attention/attention.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace attention;

namespace {

constexpr const char* kName = "gated_attention";

/// Rows and heads start at multiples of 16 bytes.
HeadRows head_rows(const Tensor& x) {
    if (x.dtype != DType::BF16) unsupported(kName, "activations other than BF16");
    if (x.stride[2] != 1 || x.stride[0] % 8 != 0 || x.stride[1] % 8 != 0 ||
        reinterpret_cast<uintptr_t>(x.data) % 16 != 0)
        unsupported(kName, "rows that do not start at multiples of 16 bytes");
    return {x.as<const bf16>(), x.stride[0], x.stride[1]};
}

bf16* cache(const Tensor& x, kv::Packing packing) {
    if (x.dtype == DType::F16) unsupported(kName, "an F16 KV cache");
    if (x.dtype == DType::F32) unsupported(kName, "an F32 KV cache");
    if ((packing == kv::Packing::plain && x.dtype != DType::BF16) || !x.contiguous() ||
        x.shape[2] != kKeysPerPage)
        unsupported(kName, "a KV cache that is not BF16 or packed [pages, G, 64, d]");
    return x.as<bf16>();
}

/// The caches, and how they are packed.
void fill_caches(const Node& node, const GatedAttentionParams& p, AttentionCall& c) {
    const Tensor &k = *node.state[0], &v = *node.state[1];
    c.k_packing = kv::packing_of(k.dtype, false), c.v_packing = kv::packing_of(v.dtype, true);
    const int head_dim = static_cast<int>(k.shape[3]);
    c.k_layout = kv::layout_of(k.dtype, false, head_dim), c.v_layout = kv::layout_of(v.dtype, true, head_dim);
    if ((c.k_packing == kv::Packing::plain) != (c.v_packing == kv::Packing::plain))
        unsupported(kName, "keys and values of which only one is packed");
    c.cache_pages = k.shape[0];
    c.k_cache = cache(k, c.k_packing), c.v_cache = cache(v, c.v_packing);
    if ((p.k_scale.size() > 1 || p.v_scale.size() > 1) && k.shape[1] > kScales)
        unsupported(kName, "scales of more than 16 KV heads");
    for (int h = 0; h < kScales && h < k.shape[1]; ++h)
        c.k_scale[h] = p.scale(false, h), c.v_scale[h] = p.scale(true, h);
}

}  // namespace

void gated_attention(const Node& node, Context& context) {
    static_assert(kKeysPerPage == kPageTokens);
    const auto& in = node.inputs;
    const auto& p = node.params<GatedAttentionParams>();
    AttentionCall c{};
    c.q = head_rows(*in[0]), c.gate = head_rows(*in[1]), c.k = head_rows(*in[2]), c.v = head_rows(*in[3]);
    c.q_norm = in[4]->as<const float>(), c.k_norm = in[5]->as<const float>();
    c.positions = in[6]->as<const int>(), c.row_sequence = in[7]->as<const int>(),
    c.start = in[8]->as<const int>();
    c.from = in[10]->as<const int>(), c.rows = static_cast<int>(p.rows);
    if (in.size() > 11) c.rope = in[11]->as<const int>(), c.rope_row = static_cast<int>(in[11]->stride[0]);
    c.row_pairs = p.row_pairs, c.column_pairs = p.column_pairs;
    c.pages = in[9]->as<const int>(), c.page_row = in[9]->stride[0];
    c.max_keys = static_cast<int>(in[9]->shape[1]) * kKeysPerPage;
    c.y = node.outputs[0]->as<bf16>(), c.rotated = node.outputs[1]->as<bf16>();
    c.work = node.outputs[2]->data, c.counters = context.counters;
    fill_caches(node, p, c);
    c.tokens = static_cast<int>(in[0]->shape[0]), c.heads = static_cast<int>(in[0]->shape[1]);
    c.kv_heads = static_cast<int>(in[2]->shape[1]), c.head_dim = static_cast<int>(in[0]->shape[2]);
    c.sequences = static_cast<int>(in[8]->shape[0]) - 1;
    // few rows meet packed pages as they are
    c.unpacked_room = c.rows < kUnpackingRows ? 0 : static_cast<int>(unpacked_pages(c.tokens, c.kv_heads));
    c.eps = p.eps, c.rotary_dims = p.rotary_dims, c.answers = p.kind == StepKind::answer;
    if (c.head_dim % 8 != 0 || c.head_dim > kMaxHeadDim || c.rotary_dims > c.head_dim ||
        c.rotary_dims % 2 != 0)
        unsupported(kName, "a head_dim that is not a multiple of 8 up to 256");
    set_turns(c, p.theta);
    attend(c, context);
}

}  // namespace quern::cuda
