// Qwen3.6: configuration, weights with their shapes, and the model class. Two families differ only in the second
// half of a layer: a mixture of experts (model type qwen3_5_moe) or one dense MLP (model type qwen3_5).
//
// Letters: D model width, L layers, H heads, G kv heads, d head size, nk/nv key and value heads of the delta
// rule, dk/dv their sizes, W convolution taps, E experts, K used experts, F expert width, Fs shared width, M
// width of the dense MLP, V vocab rows. Source: Hugging Face transformers, models/qwen3_5_moe and
// models/qwen3_5.
#pragma once

#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/draft_head.h"
#include "models/model.h"
#include "models/qwen3_6_vision.h"
#include "models/shard.h"

namespace quern {

class Checkpoint;
class Dflash;
class TensorUse;
struct ModelFamily;

struct Qwen36MoeConfig {
    int64_t width = 0;   // D
    int64_t layers = 0;  // L
    int64_t vocab_rows = 0;
    std::vector<bool> full_attention;  // [L]
    int64_t heads = 0, kv_heads = 0, head_dim = 0;
    int rotary_dims = 0;
    int row_pairs = 0,
        column_pairs = 0;  // of the rotary pairs, those of an image's rows and columns: mrope_section
    float rope_theta = 0;
    int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
    int64_t conv_taps = 0;
    int64_t experts = 0, experts_used = 0, expert_width = 0, shared_width = 0;  // all 0 in the dense family
    int64_t dense_width = 0;                                                    // M; 0 in the MoE family
    float eps = 1e-6f;
    int64_t context = 0;             // max_position_embeddings
    bool tied_head = false;          // tie_word_embeddings; a head of its own in the checkpoint wins
    std::vector<int32_t> eos_ids;    // of config.json; generation_config.json wins
    Shard shard;                     // of several ranks: heads and inner widths above are then this rank's
    std::optional<LayerRange> part;  // of several devices: the layers that this one has

    LayerRange own_layers() const { return part ? *part : LayerRange{0, static_cast<int>(layers)}; }
    bool is_first() const { return own_layers().begin == 0; }
    bool is_last() const { return own_layers().end == layers; }
    bool dense() const { return dense_width > 0; }
    /// model_type of the family: "qwen3_5_moe" or "qwen3_5".
    const char* architecture() const { return dense() ? "qwen3_5" : "qwen3_5_moe"; }
    int64_t qkv_columns() const {
        return 2 * key_heads * int64_t{key_dim} + value_heads * int64_t{value_dim};
    }
    int64_t value_columns() const { return value_heads * int64_t{value_dim}; }
};

/// Reads config.json: `config` is the parsed file (with text_config, or with its fields at the root), `file` its name
/// for messages. Throws Error(model) naming key, expected, found.
Qwen36MoeConfig parse_qwen3_6_moe_config(const nlohmann::json& config, const std::string& file);

/// What a checkpoint says a quantized KV cache should be multiplied by: one value, or one for each kv head [G], F32,
/// finite and positive. Empty: it says nothing. For keys and values in fp8 and nvfp4.
struct KvScales {
    std::vector<float> k, v;
};

struct AttentionWeights {
    Weight in_proj;         // [H*2d + G*d + G*d, D]: per head {query d, gate d}; keys; values
    Tensor q_norm, k_norm;  // F32 [d], 1 added
    Weight out_proj;        // [D, H*d]
    KvScales kv_scales;
};

struct DeltaWeights {
    Weight in_proj;              // [2*nk*dk + nv*dv | nv*dv | nv | nv, D]: qkv, z, a, b
    Tensor conv;                 // F32 [2*nk*dk + nv*dv, W]
    Tensor decay_rate, dt_bias;  // F32 [nv]; decay_rate = -exp(A_log)
    Tensor norm;                 // F32 [dv], as stored
    Weight out_proj;             // [D, nv*dv]
};

struct MoeWeights {
    Weight router;          // [E + 1, D]: gate, shared_expert_gate
    ExpertWeights gate_up;  // E x [2F, D]: gate, up
    ExpertWeights down;     // E x [D, F]
    Weight shared_gate_up;  // [2Fs, D]
    Weight shared_down;     // [D, Fs]
};

struct MlpWeights {
    Weight gate_up;  // [2M, D]
    Weight down;     // [D, M]
};

struct LayerWeights {
    Tensor input_norm, post_norm;  // F32 [D], 1 added
    AttentionWeights attention;    // this or
    DeltaWeights delta;            // this is filled
    MoeWeights moe;                // this or
    MlpWeights mlp;                // this is filled, the same one in all layers
};

/// The layer for multi-token prediction: one more layer with full attention, between a projection and a norm.
/// Embedding and head are the model's.
struct MtpWeights {
    Tensor embedding_norm, hidden_norm;  // F32 [D], 1 added
    Weight fc;                           // [D, 2 D]: of the next token's embedding, then of the hidden state
    std::vector<LayerWeights> layers;    // one
    Tensor norm;                         // F32 [D], 1 added
};

struct Qwen36MoeWeights {
    Weight embedding;  // [V, D]
    std::vector<LayerWeights> layers;
    Tensor final_norm;       // F32 [D], 1 added
    Weight head;             // [V, D]
    bool tied_head = false;  // whether `head` is the embedding's memory
    std::optional<MtpWeights> mtp;
    std::optional<DraftHead> draft_head;
    std::optional<Weight>
        whole_head;  // of rank 0 of several, to draft with: `head` is a part, and draft_head is none
    std::optional<Qwen36VisionWeights> vision;
};

/// Reads and checks every tensor of the text model, its layers on `threads` threads, and accounts for them in `use`.
/// Data stays in the mapping; `use` owns small vectors and FP8 scales. Throws Error(model); of several errors, the
/// one that a single thread would meet first.
Qwen36MoeWeights read_qwen3_6_moe_weights(const Checkpoint& checkpoint, const Qwen36MoeConfig& config,
                                          TensorUse& use, int threads = 1);

/// The MTP layer, whose tensors may be in a file of their own. Throws Error(model) if there is none, or if it cannot be read
/// or its scales cannot be right; `use` then counts none of its tensors as read.
MtpWeights read_qwen3_6_mtp(const Checkpoint& checkpoint, const Qwen36MoeConfig& config, TensorUse& use,
                            int threads = 1);

/// A rank's part of the model: heads and inner widths divided, vocab_rows and width as they are. A KV head, or a key head of
/// the delta rule, is on several ranks where there are fewer of them. Throws Error(usage) if the ranks cannot share it.
Qwen36MoeConfig shard_qwen3_6_moe(const Qwen36MoeConfig& whole, const Shard& shard);
/// Leaves that rank's part of the weights; `floats` gets memory that they point into. MTP layer and draft head stay whole on
/// rank 0, which drafts alone; other ranks have none.
void shard_qwen3_6_moe(Qwen36MoeWeights& weights, const Qwen36MoeConfig& whole, const Shard& shard,
                       std::vector<std::unique_ptr<float[]>>& floats);

/// The forward pass as a graph: qwen3_6_moe_graph.cpp.
/// `config`: of this rank; `whole`: of the model, and of its MTP layer. `drafter`: null but for Pass::taps and Pass::dflash of
/// rank 0.
BuiltGraph build_qwen3_6_moe(const Qwen36MoeConfig& config, const Qwen36MoeConfig& whole,
                             const Qwen36MoeWeights& weights, const Dflash* drafter, const BatchShape& shape,
                             const StateViews& state, DType activations);

/// What it keeps of a sequence: qwen3_6_moe_state.cpp.
std::vector<StateSpec> qwen3_6_moe_state(const Qwen36MoeConfig& config, const Qwen36MoeConfig& whole,
                                         const StateOptions& options);

/// ModelFamily::open of both families: qwen3_6_moe_model.cpp.
std::unique_ptr<Model> open_qwen3_6_moe(const ModelFamily& family, Checkpoint checkpoint,
                                        const OpenOptions& options);

}  // namespace quern
