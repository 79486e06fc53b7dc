// The forward pass of Qwen3.6: embed; per layer norm, mixer, residual, norm, MoE or MLP, residual; norm;
// head.
#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/ops/conv_gated_delta_net.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/gated_attention.h"
#include "ggml-like/ops/gather_rows.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/logits_top.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"
#include "ggml-like/ops/norm_gate_up.h"
#include "ggml-like/ops/norm_linear.h"
#include "models/qwen3_6_moe.h"

namespace quern {
namespace {

class Builder {
  public:
    Builder(const Qwen36MoeConfig& config, const Qwen36MoeWeights& weights, const BatchShape& shape,
            const StateViews& state, DType activations)
        : c_(config), w_(weights), shape_(shape), state_(state), act_(activations) {}

    BuiltGraph build() {
        declare_batch();
        return shape_.pass == Pass::mtp ? build_mtp() : build_text();
    }

  private:
    BuiltGraph build_text() {
        Residual x = embed(g_, "embed", w_.embedding, batch_.token_ids, next(w_.layers.front().input_norm));
        for (layer_ = 0; layer_ < static_cast<int>(c_.layers); ++layer_) {
            g_.set_layer(layer_);
            const LayerWeights& w = w_.layers[static_cast<size_t>(layer_)];
            x = c_.full_attention[static_cast<size_t>(layer_)] ? attention_block(w, x) : delta_block(w, x);
            const bool last = layer_ + 1 == static_cast<int>(c_.layers);
            const Tensor& norm = last ? w_.final_norm : w_.layers[static_cast<size_t>(layer_) + 1].input_norm;
            x = second_half(w, x, norm);
        }
        return finish(x, shape_.pass == Pass::hidden);
    }

    /// One more layer, over the sum of two projections: of the normed embedding of a row's token, and of the normed hidden
    /// state before that token. Source: DeepSeek-V3 (2024), section 2.2.
    BuiltGraph build_mtp() {
        CHECK(w_.mtp.has_value(), "[mtp] this model was opened without its MTP layer");
        CHECK(shape_.logit_rows == 0 || shape_.logit_rows == shape_.tokens,
              "[mtp] {} rows, {} of them with logits", shape_.tokens, shape_.logit_rows);
        const MtpWeights& w = *w_.mtp;
        const LayerWeights& layer = w.layers.front();
        Tensor* hidden = g_.input("normed_hidden", act_, {shape_.tokens, c_.width});
        layer_ = static_cast<int>(c_.layers);
        g_.set_layer(layer_);
        const Residual e =
            embed(g_, name("mtp.embed"), w_.embedding, batch_.token_ids, next(w.embedding_norm));
        Tensor* sum =
            norm_linear(g_, name("mtp.from_embedding"), e, w.from_embedding, c_.eps, shape_.kind, DType::F32);
        const Residual x =
            linear_add(g_, name("mtp.from_hidden"), hidden, w.from_hidden, sum, next(layer.input_norm));
        if (shape_.logit_rows == 0) {
            g_.output(attention(layer, x));
            return {std::move(g_), batch_, nullptr, nullptr, nullptr, hidden};
        }
        BuiltGraph built = finish(second_half(layer, attention_block(layer, x), w.norm), true);
        built.normed_hidden = hidden;
        return built;
    }

    Residual second_half(const LayerWeights& layer, const Residual& x, const Tensor& norm) {
        return c_.dense() ? mlp_block(layer, x, norm) : moe_block(layer, x, norm);
    }

    /// The head, over the rows whose logits are wanted.
    BuiltGraph finish(const Residual& x, bool hidden) {
        g_.set_layer(-1);
        if (hidden) g_.output(x.x);
        // If all rows are wanted, they are in order already.
        const bool all = shape_.logit_rows == shape_.tokens;
        const Residual rows = all ? x : gather_rows(g_, "logit_rows", x, batch_.logit_rows);
        Tensor* logits = norm_linear(g_, "logits", rows, w_.head, c_.eps, shape_.kind, DType::F32);
        Tensor* top = logits_top(g_, "logits_top", logits, batch_.temperature, shape_.vocab);
        g_.output(logits);
        g_.output(top);
        return {std::move(g_), batch_, logits, top, hidden ? x.x : nullptr};
    }

    void declare_batch() {
        const int64_t tokens = shape_.tokens, sequences = shape_.sequences,
                      logit_rows = std::max<int64_t>(1, shape_.logit_rows);
        batch_.kind = shape_.kind;
        batch_.token_ids = g_.input("token_ids", DType::I32, {tokens});
        batch_.positions = g_.input("positions", DType::I32, {tokens});
        batch_.row_sequence = g_.input("row_sequence", DType::I32, {tokens});
        batch_.start = g_.input("start", DType::I32, {sequences + 1});
        batch_.slots = g_.input("slots", DType::I32, {sequences});
        batch_.pages = g_.input("pages", DType::I32, {sequences, shape_.pages});
        batch_.committed = g_.input("committed", DType::I32, {sequences});
        batch_.journal = g_.input("journal", DType::I32, {sequences});
        batch_.logit_rows = g_.input("logit_rows", DType::I32, {logit_rows});
        batch_.temperature = g_.input("temperature", DType::F32, {logit_rows});
    }

    /// x + gated attention.
    Residual attention_block(const LayerWeights& layer, const Residual& x) {
        return out_proj(name("attn.out_proj"), layer, attention(layer, x), layer.attention.out_proj, x);
    }

    /// q, gate, k, v from one product; the gate closes the output.
    Tensor* attention(const LayerWeights& layer, const Residual& x) {
        const AttentionWeights& w = layer.attention;
        const int64_t tokens = shape_.tokens, d = c_.head_dim, q_columns = 2 * c_.heads * d,
                      kv = c_.kv_heads * d;
        Tensor* p = norm_linear(g_, name("attn.in_proj"), x, w.in_proj, c_.eps, shape_.kind, act_);
        const int64_t width = p->shape[1];
        const AttentionInputs in{
            .q = g_.view(name("attn.q"), p, 0, {tokens, c_.heads, d}, {width, 2 * d, 1}),
            .gate = g_.view(name("attn.gate"), p, d, {tokens, c_.heads, d}, {width, 2 * d, 1}),
            .k = g_.view(name("attn.k"), p, q_columns, {tokens, c_.kv_heads, d}, {width, d, 1}),
            .v = g_.view(name("attn.v"), p, q_columns + kv, {tokens, c_.kv_heads, d}, {width, d, 1}),
            .q_norm = g_.external(w.q_norm),
            .k_norm = g_.external(w.k_norm)};
        return gated_attention(g_, name("attn"), in, state(StateRole::key), state(StateRole::value), batch_,
                               {.eps = c_.eps, .theta = c_.rope_theta, .rotary_dims = c_.rotary_dims});
    }

    /// x + gated DeltaNet: qkv through the convolution, the delta rule over its state, a norm gated by z.
    Residual delta_block(const LayerWeights& layer, const Residual& x) {
        const DeltaWeights& w = layer.delta;
        const int64_t tokens = shape_.tokens, nv = c_.value_heads, dv = c_.value_dim,
                      qkv_columns = c_.qkv_columns();
        Tensor* p = norm_linear(g_, name("gdn.in_proj"), x, w.in_proj, c_.eps, shape_.kind, act_);
        const int64_t width = p->shape[1], z_begin = qkv_columns, a_begin = z_begin + nv * dv;
        const DeltaInputs in{.u = g_.columns(name("gdn.u"), p, 0, qkv_columns),
                             .a = g_.columns(name("gdn.a"), p, a_begin, nv),
                             .b = g_.columns(name("gdn.b"), p, a_begin + nv, nv),
                             .conv = g_.external(w.conv),
                             .decay_rate = g_.external(w.decay_rate),
                             .dt_bias = g_.external(w.dt_bias),
                             .z = g_.view(name("gdn.z"), p, z_begin, {tokens, nv, dv}, {width, dv, 1}),
                             .norm = g_.external(w.norm)};
        DeltaState s{.conv = state(StateRole::conv), .delta = state(StateRole::delta)};
        if (state_.has(layer_, StateRole::journal_k)) {
            s.journal_k = state(StateRole::journal_k);
            s.journal_u = state(StateRole::journal_u);
            s.journal_g = state(StateRole::journal_g);
        }
        Tensor* y = conv_gated_delta_net(g_, name("gdn"), in, s, batch_,
                                         {.key_heads = c_.key_heads,
                                          .value_heads = c_.value_heads,
                                          .key_dim = c_.key_dim,
                                          .value_dim = c_.value_dim,
                                          .eps = c_.eps});
        return out_proj(name("gdn.out_proj"), layer, y, w.out_proj, x);
    }

    /// The end of a mixer: x + y W^T, and what the norm before the mixture or MLP, and its router, need.
    Residual out_proj(const std::string& node, const LayerWeights& layer, Tensor* y, const Weight& w,
                      const Residual& x) {
        return linear_add(g_, node, y, w, x.x, next(layer.post_norm),
                          c_.dense() ? nullptr : &layer.moe.router);
    }

    /// x + mixture of experts: the K best of E, and one shared expert behind its own gate.
    Residual moe_block(const LayerWeights& layer, const Residual& x, const Tensor& norm) {
        const MoeWeights& w = layer.moe;
        const auto act = moe_gate_up(g_, name("moe.gate_up"), x, w.gate_up, w.shared_gate_up,
                                     static_cast<int>(c_.experts_used), c_.eps, shape_.kind);
        return moe_down(g_, name("moe.down"), act, x.x, w.down, w.shared_down, next(norm));
    }

    /// x + one MLP that every token takes.
    Residual mlp_block(const LayerWeights& layer, const Residual& x, const Tensor& norm) {
        const MlpWeights& w = layer.mlp;
        Tensor* y = norm_gate_up(g_, name("mlp.gate_up"), x, w.gate_up, c_.eps, shape_.kind);
        return linear_add(g_, name("mlp.down"), y, w.down, x.x, next(norm));
    }

    /// The norm that comes next.
    NextNorm next(const Tensor& norm) { return {g_.external(norm), act_, shape_.kind}; }
    std::string name(const char* part) const { return fmt::format("L{}.{}", layer_, part); }
    Tensor* state(StateRole role) { return g_.external(state_.find(layer_, role)); }

    const Qwen36MoeConfig& c_;
    const Qwen36MoeWeights& w_;
    const BatchShape shape_;
    const StateViews& state_;
    const DType act_;
    Graph g_;
    Batch batch_;
    int layer_ = 0;
};

}  // namespace

BuiltGraph build_qwen3_6_moe(const Qwen36MoeConfig& config, const Qwen36MoeWeights& weights,
                             const BatchShape& shape, const StateViews& state, DType activations) {
    return Builder(config, weights, shape, state, activations).build();
}

std::vector<StateSpec> qwen3_6_moe_state(const Qwen36MoeConfig& c, const StateOptions& options) {
    std::vector<StateSpec> specs;
    const int mtp = static_cast<int>(c.layers);  // the MTP layer's number
    for (int layer = 0; layer < (options.mtp ? mtp + 1 : mtp); ++layer) {
        const auto add = [&](StateRole role, DType dtype, bool paged, std::vector<int64_t> shape) {
            specs.push_back({layer, role, dtype, paged, std::move(shape)});
        };
        if (layer == mtp) add(StateRole::hidden, DType::F32, false, {c.width});
        if (layer == mtp || c.full_attention[static_cast<size_t>(layer)]) {
            add(StateRole::key, options.kv, true, {c.kv_heads, kPageTokens, c.head_dim});
            add(StateRole::value, options.kv, true, {c.kv_heads, kPageTokens, c.head_dim});
            continue;
        }
        const int64_t journal = options.journal;
        add(StateRole::conv, options.conv, false,
            {c.conv_taps - 1 + std::max<int64_t>(1, journal), c.qkv_columns()});
        add(StateRole::delta, DType::F32, false, {c.value_heads, c.value_dim, c.key_dim});
        if (journal > 0) {
            add(StateRole::journal_k, DType::F32, false, {journal, c.key_heads, c.key_dim});
            add(StateRole::journal_u, DType::F32, false, {journal, c.value_heads, c.value_dim});
            add(StateRole::journal_g, DType::F32, false, {journal, c.value_heads, 1});
        }
    }
    return specs;
}

}  // namespace quern
