// The passes of a DFlash drafter.
#include <tuple>

#include "ggml-like/check.h"
#include "ggml-like/ops/block_attention.h"
#include "ggml-like/ops/concat.h"
#include "ggml-like/ops/draft_token.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/follow_choice.h"
#include "ggml-like/ops/gather_rows.h"
#include "ggml-like/ops/kv_write.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/norm_gate_up.h"
#include "ggml-like/ops/norm_linear.h"
#include "models/dflash.h"
#include "models/draft_head.h"

namespace quern {
namespace {

/// Blocks of rows through all layers.
class BlockBuilder {
  public:
    BlockBuilder(const Dflash& drafter, const BatchShape& shape, const StateViews& state, int layer,
                 DType activations)
        : c_(drafter.config()), w_(drafter.weights()), shape_(shape), act_(activations) {
        k_cache_ = g_.external(state.find(layer, StateRole::key));
        v_cache_ = g_.external(state.find(layer, StateRole::value));
        declared_ = declare_batch(g_, shape);
        declared_.follows = g_.input("follows", DType::I32, {shape.sequences});
        batch_ = declared_;
        std::tie(batch_.token_ids, batch_.positions) =
            follow_choice(g_, "dflash.follow", declared_, g_.external(state.find(layer, StateRole::chosen)));
        drafts_ = draft_ids(g_, state, layer, {1, shape.logit_rows});
    }

    BuiltGraph build(const Weight& embedding, const Weight& head, const DraftHead* short_head) {
        Residual x = embed(g_, "dflash.embed", embedding, batch_.token_ids,
                           next(w_.layers.front().input_norm), {}, true);
        for (layer_ = 0; layer_ < w_.layers.size(); ++layer_) {
            const DflashLayer& l = w_.layers[layer_];
            g_.set_layer(static_cast<int>(layer_));
            x = linear_add(g_, name("out_proj"), attention(l, x), l.out_proj, x.x, next(l.post_norm));
            Tensor* y = norm_gate_up(g_, name("gate_up"), x, l.gate_up, c_.eps, shape_.kind);
            const bool last = layer_ + 1 == w_.layers.size();
            x = linear_add(g_, name("down"), y, l.down, x.x,
                           next(last ? w_.norm : w_.layers[layer_ + 1].input_norm));
        }
        g_.set_layer(-1);
        const Residual rows = gather_rows(g_, "dflash.rows", x, batch_.logit_rows);
        const bool whole = shape_.draft_rows == DraftRows::all || short_head == nullptr;
        const Weight& w = whole ? head : short_head->rows(shape_.draft_rows);
        const TokenColumns columns = whole ? TokenColumns{0, 0, shape_.vocab} : short_head->columns;
        Tensor* ids = g_.view("dflash.drafts", drafts_, 0, {shape_.logit_rows}, {1});
        BuiltGraph built{.batch = declared_, .top = ids};
        if (shape_.full_head) {
            built.logits = norm_linear(g_, "dflash.logits", rows, w, c_.eps, shape_.kind, DType::F32);
            best_token(g_, "dflash.best_token", built.logits, columns, ids);
            g_.output(built.logits);
        } else {
            draft_token(g_, "dflash.draft_token", rows, w, columns, c_.eps, shape_.kind, ids);
        }
        built.graph = std::move(g_);
        return built;
    }

  private:
    Tensor* attention(const DflashLayer& l, const Residual& x) {
        Tensor* p = norm_linear(g_, name("in_proj"), x, l.in_proj, c_.eps, shape_.kind, act_);
        const int64_t tokens = shape_.tokens, d = c_.head_dim, width = p->shape[1], q = c_.query_columns(),
                      kv = c_.kv_columns();
        const BlockAttentionInputs in{
            .q = g_.view(name("q"), p, 0, {tokens, c_.heads, d}, {width, d, 1}),
            .k = g_.view(name("k"), p, q, {tokens, c_.kv_heads, d}, {width, d, 1}),
            .v = g_.view(name("v"), p, q + kv, {tokens, c_.kv_heads, d}, {width, d, 1}),
            .q_norm = g_.external(l.q_norm),
            .k_norm = g_.external(l.k_norm)};
        return block_attention(g_, name("attn"), in, k_cache_, v_cache_, batch_,
                               {.eps = c_.eps,
                                .rotary = c_.rotary,
                                .first_head = static_cast<int64_t>(layer_) * c_.kv_heads,
                                .window = c_.windows[layer_],
                                .causal = c_.causal_layer(layer_, shape_.causal_windows)});
    }

    NextNorm next(const Tensor& norm) { return {g_.external(norm), act_, shape_.kind}; }
    std::string name(const char* part) const { return fmt::format("dflash.L{}.{}", layer_, part); }

    const DflashConfig& c_;
    const DflashWeights& w_;
    const BatchShape shape_;
    const DType act_;
    Graph g_;
    Batch declared_, batch_;  // as the host fills it; as the layers read it
    Tensor *k_cache_, *v_cache_, *drafts_;
    size_t layer_ = 0;
};

}  // namespace

void dflash_context(Graph& g, const Dflash& drafter, const std::vector<Tensor*>& taps, const Batch& batch,
                    Tensor* k_cache, Tensor* v_cache, DType activations) {
    const DflashConfig& c = drafter.config();
    const DflashWeights& w = drafter.weights();
    const int64_t tokens = taps.front()->shape[0], heads = c.layers * c.kv_heads, d = c.head_dim;
    Tensor* joined = concat(g, "dflash.taps", taps, activations);
    Tensor* nothing = no_residual(g, "dflash.zero", tokens, c.width, batch.kind);
    const Residual fused = linear_add(g, "dflash.fc", joined, w.fc, nothing,
                                      {g.external(w.hidden_norm), activations, batch.kind});
    Tensor* kv = norm_linear(g, "dflash.context", fused, w.context, c.eps, batch.kind, activations);
    const int64_t width = kv->shape[1];
    kv_write(g, "dflash.kv", g.view("dflash.k", kv, 0, {tokens, heads, d}, {width, d, 1}),
             g.view("dflash.v", kv, heads * d, {tokens, heads, d}, {width, d, 1}), g.external(w.k_norms),
             k_cache, v_cache, batch, {.eps = c.eps, .rotary = c.rotary});
}

BuiltGraph build_dflash(const Dflash& drafter, const Weight& embedding, const Weight& head,
                        const DraftHead* short_head, const BatchShape& shape, const StateViews& state,
                        int layer, DType activations) {
    return BlockBuilder(drafter, shape, state, layer, activations).build(embedding, head, short_head);
}

std::vector<StateSpec> dflash_state(const DflashConfig& c, int layer, DType dtype) {
    const std::vector<int64_t> shape = {c.layers * c.kv_heads, kPageTokens, c.head_dim};
    std::vector<StateSpec> specs = draft_specs(layer);
    for (const StateRole role : {StateRole::key, StateRole::value})
        specs.push_back({layer, role, dtype, true, shape});
    return specs;
}

}  // namespace quern
