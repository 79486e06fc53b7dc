// DFlash: a drafter that guesses a block of tokens in one pass. It sees the model through hidden states tapped after some of
// its layers, which become keys and values of the drafter's layers for every token that the model has run; a block is the
// newest token and n masks, whose rows give the n tokens that follow. Embedding and head are the model's.
//
// Letters: D width (the model's), L layers, H heads, G kv heads, d head size, M MLP width, A taps.
//
//   fused[p] = fc [h_1[p] | ... | h_A[p]],  h_a the residual stream after the model's layer taps[a], no norm
//   c = norm(fused) * hidden_norm;  for each layer: K[p] = rope_p(k_norm(W_k c)), V[p] = W_v c
//   block: x = embedding of [newest, mask, ...]; per layer norm, attention over the K, V of all positions before the block
//   and over the block's own (ops/block_attention.h), residual, norm, SwiGLU, residual; norm; head.
//
// Source: the configurations and tensors of z-lab's published drafters, and their forward pass.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ggml-like/ops/residual.h"
#include "ggml-like/ops/rotary.h"
#include "models/checkpoint.h"
#include "models/model.h"

namespace quern {

class ContentHash;
struct DraftHead;

/// What a drafter has to fit.
struct DflashTarget {
    int64_t width, layers, vocab_rows;
};

struct DflashConfig {
    int64_t width = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, mlp_width = 0;
    std::vector<int64_t> taps;     // [A] layers of the model
    std::vector<int64_t> windows;  // [L] 0: full attention
    int64_t block = 0;             // rows of a block at most, the newest token's included
    int32_t mask = 0;              // token id
    std::optional<bool>
        causal;     // whether rows of a block see those after them not; empty: the config is silent
    Rotary rotary;  // over all of a head
    float eps = 1e-6f;

    int64_t query_columns() const { return heads * head_dim; }
    int64_t kv_columns() const { return kv_heads * head_dim; }
    bool has_windows() const;
    /// Whether rows of a block see only those before them in this layer, if silent configs mean that for windows.
    bool causal_layer(size_t layer, bool causal_windows) const;
};

/// Reads config.json of a drafter. Throws Error(model) naming file, key, expected and found; also where it does not fit the
/// model.
DflashConfig parse_dflash_config(const nlohmann::json& config, const std::string& file,
                                 const DflashTarget& target);

struct DflashLayer {
    Tensor input_norm, post_norm;  // F32 [D], as stored
    Tensor q_norm, k_norm;         // F32 [d]
    Weight in_proj;                // [H*d + G*d + G*d, D]: q, k, v
    Weight out_proj;               // [D, H*d]
    Weight gate_up, down;          // [2M, D], [D, M]
};

struct DflashWeights {
    Weight fc;                        // [D, A*D]
    Tensor hidden_norm, norm;         // F32 [D]
    Weight context;                   // [2*L*G*d, D]: k of all layers, then v of all layers
    Tensor k_norms;                   // F32 [L, d]
    std::vector<DflashLayer> layers;  // in_proj has k and v of `context` once more
};

/// A drafter beside a model.
class Dflash {
  public:
    /// `path`: as of open_model. Throws Error(model) unless it fits the model and all its tensors are known.
    static std::unique_ptr<Dflash> open(const std::string& path, const DflashTarget& target, int threads);
    /// Random weights in the shapes of published drafters: "new" (5 layers with windows and a full one) or "old" (8 full
    /// layers, YaRN; only for width 2048). Throws Error(usage) that lists them.
    static std::unique_ptr<Dflash> synthetic(const std::string& name, const DflashTarget& target);

    const DflashConfig& config() const { return config_; }
    const DflashWeights& weights() const { return weights_; }
    /// Adds all of it, as of the layer after `layer`.
    void list(std::vector<WeightUse>& uses, int layer);
    /// Whether it is one of its weights.
    bool has(const Weight& weight) const;
    /// Null: random weights.
    const Checkpoint* checkpoint() const { return checkpoint_ ? &*checkpoint_ : nullptr; }
    void add_to(ContentHash& hash) const;
    const std::string& name() const { return name_; }

  private:
    friend class DflashReader;
    friend class DflashMaker;
    std::optional<Checkpoint> checkpoint_;  // keeps the mapping that the weights point into; none: synthetic
    std::string name_;
    DflashConfig config_;
    DflashWeights weights_;
    std::vector<std::unique_ptr<float[]>> floats_;
};

/// Nodes at the end of a step of the model: the drafter's keys and values of its rows, from the taps, F32 [T, D] each.
void dflash_context(Graph& g, const Dflash& drafter, const std::vector<Tensor*>& taps, const Batch& batch,
                    Tensor* k_cache, Tensor* v_cache, DType activations);

/// Pass::dflash: blocks of drafted tokens. `short_head`: null, or a smaller head (draft_head.h). State is that of layer `layer`.
BuiltGraph build_dflash(const Dflash& drafter, const Weight& embedding, const Weight& head,
                        const DraftHead* short_head, const BatchShape& shape, const StateViews& state,
                        int layer, DType activations);

/// Keys and values of all its layers, as layer `layer`, and what a layer that drafts has.
std::vector<StateSpec> dflash_state(const DflashConfig& config, int layer, DType dtype);

}  // namespace quern
