// The forward pass of Qwen3.6: embed; per layer norm, mixer, residual, norm, MoE or MLP, residual; norm;
// head.
#include <algorithm>
#include <tuple>

#include "ggml-like/check.h"
#include "ggml-like/ops/accept_drafts.h"
#include "ggml-like/ops/arrived_rows.h"
#include "ggml-like/ops/conv_gated_delta_net.h"
#include "ggml-like/ops/draft_token.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/follow_draft.h"
#include "ggml-like/ops/gated_attention.h"
#include "ggml-like/ops/gather_rows.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/logits_top.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"
#include "ggml-like/ops/mtp_rows.h"
#include "ggml-like/ops/norm_gate_up.h"
#include "ggml-like/ops/norm_linear.h"
#include "ggml-like/ops/write_ring.h"
#include "models/dflash.h"
#include "models/qwen3_6_moe.h"

namespace quern {
namespace {

/// The head of all tokens.
const Weight& drafting_head(const Qwen36MoeWeights& w) { return w.whole_head ? *w.whole_head : w.head; }

class Builder {
  public:
    Builder(const Qwen36MoeConfig& config, const Qwen36MoeConfig& whole, const Qwen36MoeWeights& weights,
            const Dflash* drafter, const BatchShape& shape, const StateViews& state, DType activations)
        : c_(config),
          whole_(whole),
          w_(weights),
          drafter_(drafter),
          shape_(shape),
          state_(state),
          act_(activations) {}

    BuiltGraph build() {
        BatchShape declared = shape_;
        declared.images &= embeds_prompts();
        batch_ = declare_batch(g_, declared, w_.vision ? c_.width : 0);
        if (reads_drafts()) batch_.draft_source = g_.input("draft_source", DType::I32, {shape_.tokens});
        return shape_.pass == Pass::mtp ? build_mtp() : build_text();
    }

  private:
    BuiltGraph build_text() {
        const LayerRange own = c_.own_layers();
        Residual x = begin(own.begin);
        const Residual arrived = x;
        const std::vector<Tensor*> arrived_taps = taps_before(own.begin);
        for (layer_ = own.begin; layer_ < own.end; ++layer_) {
            g_.set_layer(layer_);
            const LayerWeights& w = w_.layers[static_cast<size_t>(layer_)];
            x = mixer_block(w, x);
            if (x.x == nullptr) break;  // nobody reads what follows
            const Tensor& norm =
                is_last(layer_) ? w_.final_norm : w_.layers[static_cast<size_t>(layer_) + 1].input_norm;
            x = second_half(w, x, norm);
            tap(x);
        }
        if (drafter_ != nullptr && shape_.pass == Pass::taps && c_.is_last()) add_context();
        BuiltGraph built = c_.is_last() ? finish(x) : leave(x);
        if (own.begin == 0) return built;
        built.arriving = {arrived.x, arrived.h, arrived.squares};
        built.arriving.insert(built.arriving.end(), arrived_taps.begin(), arrived_taps.end());
        return built;
    }

    bool is_last(int layer) const { return layer + 1 == static_cast<int>(c_.layers); }
    /// Whether nobody reads what this layer leaves of rows without logits: they end with its mixer.
    bool narrows(int layer) const {
        // A rank has the residual stream of some rows alone, and not of those.
        if (!is_last(layer) || !shape_.narrows() || !c_.shard.whole()) return false;
        return shape_.pass == Pass::text ||
               (shape_.pass == Pass::taps && std::ranges::count(drafter_->config().taps, layer) == 0);
    }

    /// Where tokens of prompts, and images, are embedded: for the model, or for its MTP layer.
    bool embeds_prompts() const { return c_.is_first() || (c_.is_last() && shape_.pass == Pass::hidden); }

    /// The rows as they come to a layer: the first one's are embedded here.
    Residual begin(int layer) {
        const NextNorm norm = next(w_.layers[static_cast<size_t>(layer)].input_norm);
        if (!c_.is_first()) return arrived_rows(g_, "arrived", shape_.tokens, c_.width, norm);
        if (batch_.draft_source != nullptr) {
            late_ = {batch_.draft_source,
                     g_.external(flat(state_.find(drafting_layer(), StateRole::drafts)))};
            return embed(g_, "embed", w_.embedding, batch_.token_ids, norm, late_);
        }
        return embed(g_, "embed", w_.embedding, batch_.token_ids, norm,
                     {batch_.image_source, batch_.image_rows});
    }

    /// Whether rows may be of tokens that a pass of this device drafted, and that the host does not know yet.
    bool reads_drafts() const {
        return shape_.kind == StepKind::answer && shape_.tokens > shape_.sequences &&
               (shape_.pass == Pass::hidden || shape_.pass == Pass::taps) && c_.is_first() && c_.is_last() &&
               c_.shard.whole() && state_.has(drafting_layer(), StateRole::drafts);
    }
    /// The number of the layer whose state the drafter has.
    int drafting_layer() const { return static_cast<int>(c_.layers) + (shape_.pass == Pass::taps ? 1 : 0); }

    /// What the device with the next layers goes on from.
    BuiltGraph leave(const Residual& x) {
        BuiltGraph built{.batch = batch_, .leaving = {x.x, x.h, x.squares}};
        for (Tensor* t : taps_)
            if (t != nullptr) built.leaving.push_back(t);
        if (c_.is_first()) declare_next(built);
        for (Tensor* t : built.leaving) g_.output(t);
        built.graph = std::move(g_);
        return built;
    }

    /// The MTP layer alone. Its first forward pass reads hidden states from the ring; those after it, one row a sequence, what
    /// the one before left and the token that it drafted.
    BuiltGraph build_mtp() {
        begin_mtp();
        const LayerWeights& layer = w_.mtp->layers.front();
        MtpTensors io;
        io.ring_rows = g_.input("ring_rows", DType::I32, {shape_.tokens});
        const FollowedRows rows = shape_.drafts > 0 ? followed_rows(io) : FollowedRows{batch_.token_ids};
        Residual x = mtp_input(rows.ids, hidden_ring(), io.ring_rows, w_.final_norm);
        const bool keys_only = shape_.drafts == 0 && shape_.kind == StepKind::prompt;
        Tensor* y = attention(layer, x, keys_only ? no_rows() : WantedRows{});
        if (shape_.drafts == 0) {
            g_.output(y);
        } else {
            if (rows.last_rows != nullptr)
                std::tie(y, x.x) = gather_rows(g_, name("mtp.last"), y, x.x, rows.last_rows);
            draft(x, y, io, rows);
        }
        return {.graph = std::move(g_), .batch = batch_, .mtp = std::move(io)};
    }

    /// What of a pass that drafts depends on the last step's choice, which the host may not know yet.
    FollowedRows followed_rows(MtpTensors& io) {
        const int64_t n = shape_.sequences;
        FollowedRows rows{batch_.token_ids};
        if (shape_.tokens > n) rows.last_rows = io.last_rows = g_.input("last_rows", DType::I32, {n});
        if (shape_.drafts > 1) {
            const auto declare = [&](const char* what) {
                return g_.input(what, DType::I32, {shape_.drafts - 1, n});
            };
            rows.later_positions = io.later_positions = declare("later_positions");
            if (w_.vision) rows.later_rope = io.later_rope = declare("later_rope");
            io.later_sequence = g_.input("later_sequence", DType::I32, {n});
            io.later_start = g_.input("later_start", DType::I32, {n + 1});
        }
        batch_.follows = g_.input("follows", DType::I32, {n});
        batch_.draft_source = g_.input("draft_source", DType::I32, {shape_.tokens});
        return follow_draft(g_, name("mtp.follow"), batch_,
                            {batch_.draft_source, g_.external(flat(state_.find(layer_, StateRole::drafts)))},
                            rows, state(StateRole::chosen));
    }

    void begin_mtp() {
        CHECK(w_.mtp.has_value(), "[mtp] this model was opened without its MTP layer");
        c_ = whole_;
        layer_ = static_cast<int>(c_.layers);
        g_.set_layer(layer_);
    }

    /// All drafts, from the first row of each sequence: the residual stream x before its mixer's output y is added.
    void draft(Residual x, Tensor* y, MtpTensors& io, const FollowedRows& rows) {
        const LayerWeights& layer = w_.mtp->layers.front();
        const int64_t n = shape_.sequences;
        const bool whole = shape_.draft_rows == DraftRows::all || !w_.draft_head;
        const Weight& head = whole ? drafting_head(w_) : w_.draft_head->rows(shape_.draft_rows);
        const TokenColumns columns = whole ? TokenColumns{0, 0, shape_.vocab} : w_.draft_head->columns;
        io.drafts = draft_ids(g_, state_, layer_, {shape_.drafts, n});
        const Batch all = batch_;
        for (int64_t i = 0;; ++i) {
            const Residual out = second_half(
                layer, out_proj(name("attn.out_proj"), layer, y, layer.attention.out_proj, x), w_.mtp->norm);
            Tensor* ids = row_of(io.drafts, i);
            if (shape_.full_head) {
                Tensor* logits =
                    norm_linear(g_, name("draft_head"), out, head, c_.eps, shape_.kind, DType::F32);
                best_token(g_, name("best_token"), logits, columns, ids);
                g_.output(logits);
                io.logits.push_back(logits);
            } else {
                draft_token(g_, name("draft_token"), out, head, columns, c_.eps, shape_.kind, ids);
            }
            if (i + 1 == shape_.drafts) break;
            batch_.positions = row_of(rows.later_positions, i);
            if (w_.vision)  // the same on all three axes
                batch_.rope = g_.view(name("later_rope"), rows.later_rope, i * n, {3, n}, {0, 1});
            batch_.row_sequence = io.later_sequence;
            batch_.start = io.later_start;
            x = mtp_input(ids, out.x, nullptr, w_.mtp->norm, {}, true);
            y = attention(layer, x);
        }
        batch_ = all;
    }

    /// The MTP layer's residual stream, from rows of hidden states and the tokens after them. norm: that of the pass which left the
    /// hidden states. after_all: these rows' attention reads keys and positions that earlier nodes made, before it waits (attention/decode.cu).
    Residual mtp_input(Tensor* next_ids, Tensor* hidden, Tensor* rows, const Tensor& norm,
                       const OtherRows& images = {}, bool after_all = false) {
        const MtpWeights& w = *w_.mtp;
        const MtpNorms norms{g_.external(w.embedding_norm), g_.external(norm), g_.external(w.hidden_norm),
                             c_.eps};
        Tensor* joined = mtp_rows(g_, name("mtp.rows"), w_.embedding, next_ids, hidden, rows, norms, images,
                                  act_, after_all);
        return linear_add(g_, name("mtp.fc"), joined, w.fc, nothing(joined->shape[0]),
                          next(w.layers.front().input_norm));
    }

    /// Zeros to add to.
    Tensor* nothing(int64_t rows) {
        if (nothing_ == nullptr) nothing_ = no_residual(g_, "nothing", shape_.tokens, c_.width, shape_.kind);
        return g_.view(fmt::format("nothing[{}]", rows), nothing_, 0, {rows, c_.width},
                       {nothing_->stride[0], 1});
    }

    /// Row i of a matrix that is read as a vector.
    Tensor* row_of(Tensor* matrix, int64_t i) {
        const int64_t n = matrix->shape[1];
        return g_.view(fmt::format("{}[{}]", matrix->name, i), matrix, i * n, {n}, {1});
    }

    /// The rings of all slots, as rows.
    Tensor* hidden_ring() {
        const Tensor ring = state_.find(layer_, StateRole::hidden);
        Tensor rows =
            make_tensor(ring.name, ring.dtype, ring.place, {ring.shape[0] * ring.shape[1], c_.width});
        rows.data = ring.data;
        return g_.external(rows);
    }

    /// What the MTP layer reads of prompts beside hidden states. All ranks have these inputs, and the first device, which the last
    /// one gets them from.
    void declare_next(BuiltGraph& built) {
        if (shape_.pass != Pass::hidden || shape_.kind != StepKind::prompt) return;
        built.next_ids = g_.input("next_ids", DType::I32, {shape_.tokens});
        if (batch_.image_rows != nullptr)
            built.next_source = g_.input("next_source", DType::I32, {shape_.tokens});
    }

    /// Keeps the hidden states of the step's rows for the MTP layer. Of ranks only the first drafts.
    void keep_hidden(Tensor* x) {
        if (shape_.pass != Pass::hidden || c_.shard.rank > 0) return;
        const int layer = static_cast<int>(c_.layers);
        g_.set_layer(layer);
        write_ring(g_, fmt::format("L{}.mtp.ring", layer), x,
                   g_.external(state_.find(layer, StateRole::hidden)), batch_);
    }

    /// Computes the MTP layer's keys and values of prompts, whose next tokens are known.
    void read_hidden(Tensor* x, BuiltGraph& built) {
        declare_next(built);
        if (shape_.kind == StepKind::answer || c_.shard.rank > 0) return;
        begin_mtp();
        const Residual in =
            mtp_input(built.next_ids, x, nullptr, w_.final_norm, {built.next_source, batch_.image_rows});
        g_.output(attention(w_.mtp->layers.front(), in, no_rows()));
    }

    /// What the drafter reads of layers that other devices have: it arrives with the rows.
    std::vector<Tensor*> taps_before(int layer) {
        std::vector<Tensor*> arrived;
        if (shape_.pass != Pass::taps || drafter_ == nullptr) return arrived;
        const std::vector<int64_t>& taps = drafter_->config().taps;
        taps_.resize(taps.size());
        for (size_t i = 0; i < taps.size(); ++i) {
            if (taps[i] >= layer) continue;
            taps_[i] = arrived_tap(g_, fmt::format("arrived.tap{}", i), shape_.tokens, c_.width);
            arrived.push_back(taps_[i]);
        }
        return arrived;
    }

    /// Keeps the residual stream after this layer for the drafter, if it reads it.
    void tap(const Residual& x) {
        if (shape_.pass != Pass::taps || drafter_ == nullptr) return;
        const std::vector<int64_t>& taps = drafter_->config().taps;
        for (size_t i = 0; i < taps.size(); ++i)
            if (taps[i] == layer_) taps_[i] = x.x;
    }

    /// The drafter's keys and values of all rows.
    void add_context() {
        layer_ = static_cast<int>(c_.layers) + 1;
        g_.set_layer(layer_);
        dflash_context(g_, *drafter_, taps_, batch_, state(StateRole::key), state(StateRole::value), act_);
    }

    Residual second_half(const LayerWeights& layer, const Residual& x, const Tensor& norm) {
        return c_.dense() ? mlp_block(layer, x, norm) : moe_block(layer, x, norm);
    }

    /// The head, over the rows whose logits are wanted.
    BuiltGraph finish(const Residual& x) {
        keep_hidden(x.x);  // before the head, whose first weights come meanwhile
        g_.set_layer(-1);
        BuiltGraph built{.batch = batch_};
        if (shape_.logit_rows > 0) add_logits(x, built);
        if (shape_.pass == Pass::hidden) read_hidden(x.x, built);
        built.graph = std::move(g_);
        return built;
    }

    void add_logits(const Residual& x, BuiltGraph& built) {
        // If all that there are are wanted, they are in order already.
        const bool all = x.h->shape[0] == batch_.logit_rows->shape[0];
        const Residual rows = all ? x : gather_rows(g_, "logit_rows", x, batch_.logit_rows);
        built.logits = norm_linear(g_, "logits", rows, w_.head, c_.eps, shape_.kind, DType::F32);
        built.top = logits_top(g_, "logits_top", built.logits, batch_.temperature, own_vocab());
        g_.output(built.logits);
        g_.output(built.top);
        if (all && batch_.draft_source != nullptr)
            accept_drafts(g_, "accept_drafts", batch_, late_, built.top,
                          g_.external(state_.find(drafting_layer(), StateRole::chosen)));
    }

    /// Ids of this rank's rows of the head that may be sampled. A rank that has none looks at one row, which nobody reads.
    int64_t own_vocab() const {
        return std::clamp<int64_t>(shape_.vocab - c_.shard.begin(c_.vocab_rows), 1, w_.head.rows);
    }

    /// x + gated attention or gated DeltaNet; nothing where no rows are left.
    Residual mixer_block(const LayerWeights& layer, Residual x) {
        const bool attends = c_.full_attention[static_cast<size_t>(layer_)];
        const bool narrow = narrows(layer_);
        Tensor* y =
            !attends ? delta(layer, x) : attention(layer, x, narrow ? rows_with_logits() : WantedRows{});
        if (narrow && shape_.logit_rows == 0) {
            g_.output(y);
            return {};
        }
        if (narrow) std::tie(y, x.x) = gather_rows(g_, name("mixer.rows"), y, x.x, batch_.logit_rows);
        return attends ? out_proj(name("attn.out_proj"), layer, y, layer.attention.out_proj, x)
                       : out_proj(name("gdn.out_proj"), layer, y, layer.delta.out_proj, x);
    }

    WantedRows rows_with_logits() const { return {batch_.logits_from, shape_.logit_rows}; }
    /// Of a prompt whose keys and values alone are wanted.
    WantedRows no_rows() { return {g_.view(name("ends"), batch_.start, 1, {shape_.sequences}, {1}), 0}; }

    /// q, gate, k, v from one product; the gate closes the output.
    Tensor* attention(const LayerWeights& layer, const Residual& x, const WantedRows& wanted = {}) {
        const AttentionWeights& w = layer.attention;
        const int64_t d = c_.head_dim, q_columns = 2 * c_.heads * d, kv = c_.kv_heads * d;
        Tensor* p = norm_linear(g_, name("attn.in_proj"), x, w.in_proj, c_.eps, shape_.kind, act_);
        const int64_t tokens = p->shape[0], width = p->shape[1];
        const AttentionInputs in{
            .q = g_.view(name("attn.q"), p, 0, {tokens, c_.heads, d}, {width, 2 * d, 1}),
            .gate = g_.view(name("attn.gate"), p, d, {tokens, c_.heads, d}, {width, 2 * d, 1}),
            .k = g_.view(name("attn.k"), p, q_columns, {tokens, c_.kv_heads, d}, {width, d, 1}),
            .v = g_.view(name("attn.v"), p, q_columns + kv, {tokens, c_.kv_heads, d}, {width, d, 1}),
            .q_norm = g_.external(w.q_norm),
            .k_norm = g_.external(w.k_norm),
            .wanted = wanted};
        return gated_attention(g_, name("attn"), in, state(StateRole::key), state(StateRole::value), batch_,
                               {.eps = c_.eps,
                                .theta = c_.rope_theta,
                                .rotary_dims = c_.rotary_dims,
                                .row_pairs = c_.row_pairs,
                                .column_pairs = c_.column_pairs,
                                .k_scale = w.kv_scales.k,
                                .v_scale = w.kv_scales.v});
    }

    /// qkv through the convolution, the delta rule over its state, a norm gated by z.
    Tensor* delta(const LayerWeights& layer, const Residual& x) {
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
        return conv_gated_delta_net(g_, name("gdn"), in, s, batch_,
                                    {.key_heads = c_.key_heads,
                                     .value_heads = c_.value_heads,
                                     .key_dim = c_.key_dim,
                                     .value_dim = c_.value_dim,
                                     .eps = c_.eps,
                                     .drafts = shape_.verifies});
    }

    /// The end of a mixer: x + y W^T, and what the norm before the mixture or MLP, and its router, need.
    Residual out_proj(const std::string& node, const LayerWeights& layer, Tensor* y, const Weight& w,
                      const Residual& x) {
        const Weight* router = c_.dense() ? nullptr : &layer.moe.router;
        return linear_add(g_, node, y, w, x.x, next(layer.post_norm), router, over_ranks());
    }

    /// How products end of which each rank has a part. Drafters and other devices read the residual stream itself.
    OverRanks over_ranks() {
        if (c_.shard.whole()) return {};
        if (nothing_ == nullptr) nothing_ = g_.zeros("nothing", DType::F32, {shape_.tokens, c_.width});
        return {.zeros = nothing_,
                .whole = shape_.whole_residual || shape_.pass != Pass::text || !c_.is_last()};
    }

    /// x + mixture of experts: the K best of E, and one shared expert behind its own gate.
    Residual moe_block(const LayerWeights& layer, const Residual& x, const Tensor& norm) {
        const MoeWeights& w = layer.moe;
        const auto act = moe_gate_up(g_, name("moe.gate_up"), x, w.gate_up, w.shared_gate_up,
                                     static_cast<int>(c_.experts_used), c_.eps, shape_.kind);
        return moe_down(g_, name("moe.down"), act, x.x, w.down, w.shared_down, next(norm), over_ranks());
    }

    /// x + one MLP that every token takes.
    Residual mlp_block(const LayerWeights& layer, const Residual& x, const Tensor& norm) {
        const MlpWeights& w = layer.mlp;
        Tensor* y = norm_gate_up(g_, name("mlp.gate_up"), x, w.gate_up, c_.eps, shape_.kind);
        return linear_add(g_, name("mlp.down"), y, w.down, x.x, next(norm), nullptr, over_ranks());
    }

    /// The norm that comes next.
    NextNorm next(const Tensor& norm) { return {g_.external(norm), act_, shape_.kind}; }
    std::string name(const char* part) const { return fmt::format("L{}.{}", layer_, part); }
    Tensor* state(StateRole role) { return g_.external(state_.find(layer_, role)); }

    Qwen36MoeConfig c_;  // of the layer that is built: of this rank or, of the MTP layer, whole_
    const Qwen36MoeConfig& whole_;
    const Qwen36MoeWeights& w_;
    const Dflash* drafter_;
    std::vector<Tensor*> taps_;
    const BatchShape shape_;
    const StateViews& state_;
    const DType act_;
    Graph g_;
    Batch batch_;
    OtherRows late_;  // drafts that the host does not know yet
    Tensor* nothing_ = nullptr;
    int layer_ = 0;
};

}  // namespace

BuiltGraph build_qwen3_6_moe(const Qwen36MoeConfig& config, const Qwen36MoeConfig& whole,
                             const Qwen36MoeWeights& weights, const Dflash* drafter, const BatchShape& wanted,
                             const StateViews& state, DType activations) {
    CHECK(drafter != nullptr || wanted.pass < Pass::taps ||
              (config.shard.rank > 0 && wanted.pass == Pass::taps),
          "[dflash] this model was opened without a drafter");
    BatchShape shape = wanted;
    if (shape.full_head) shape.draft_rows = DraftRows::all;
    if (weights.draft_head && !config.shard.whole()) {  // no rank has all of the head
        shape.full_head = false;
        shape.draft_rows = std::min(shape.draft_rows, DraftRows::copied);
    }
    const int layer = static_cast<int>(config.layers) + 1;
    if (shape.pass == Pass::dflash)
        return build_dflash(*drafter, weights.embedding, drafting_head(weights),
                            weights.draft_head ? &*weights.draft_head : nullptr, shape, state, layer,
                            activations);
    return Builder(config, whole, weights, drafter, shape, state, activations).build();
}

}  // namespace quern
