// Model: what an engine needs of any checkpoint: a summary, its text side, state sizes, and build().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/graph.h"
#include "ggml-like/ops/batch.h"
#include "ggml-like/requantize.h"

namespace quern {

class Tokenizer;
struct Audit;

/// Sizes of one step. A plan is built once for each.
struct BatchShape {
    StepKind kind = StepKind::prompt;
    int64_t tokens = 0;
    int64_t sequences = 0;
    int64_t logit_rows = 0;
    int64_t pages = 0;  // columns of the page table: the most pages a sequence may have
    int64_t vocab = 0;  // ids that may be sampled
    auto operator<=>(const BatchShape&) const = default;
};

enum class StateRole : uint8_t { key, value, conv, delta, journal_k, journal_u, journal_g };

/// One state tensor of one layer, for one slot (a sequence) or one page (64 tokens of KV).
struct StateSpec {
    int layer;
    StateRole role;
    DType dtype;
    bool paged;                  // outer dimension: pages, else slots
    std::vector<int64_t> shape;  // without the outer dimension

    int64_t bytes() const;
};

struct StateOptions {
    DType kv = DType::BF16;
    DType conv =
        DType::BF16;  // what the convolution's inputs are stored in; the recurrent state is always F32
    int journal = 0;  // entries a slot, for speculation
};

/// Where each layer's state lives; the engine's StatePool fills it.
class StateViews {
  public:
    virtual ~StateViews() = default;
    /// Tensor of Place::state with the outer dimension in front; throws if the pool has none.
    virtual Tensor find(int layer, StateRole role) const = 0;
    virtual bool has(int layer, StateRole role) const = 0;
};

struct BuiltGraph {
    Graph graph;
    Batch batch;               // inputs to fill
    Tensor* logits = nullptr;  // F32 [logit_rows, vocab rows]
    Tensor* top = nullptr;     // I32 [logit_rows, kTopWords]: ops/logits_top.h
};

struct ModelInfo {
    std::string name;          // directory or repo name
    std::string architecture;  // model_type: "qwen3_5_moe", or "qwen3_5", which is dense
    std::string formats;       // "NVFP4 + BF16"
    int64_t layers = 0;
    int64_t attention_layers = 0;
    int64_t width = 0;
    int64_t experts = 0;  // 0: dense
    int64_t experts_used = 0;
    int64_t vocab_rows = 0;  // rows of the head
    int64_t vocab = 0;       // ids that may be sampled: the tokenizer's, else vocab_rows
    int64_t context = 0;     // positions the model was made for
    int64_t parameters = 0;
    int64_t weight_bytes = 0;                    // text model, as stored
    int64_t token_bytes = 0;                     // weights read for one decoded token
    DenseFormat dense = DenseFormat::as_stored;  // what LoadOptions::dense asked for
};

/// From generation_config.json; what the file does not say is empty.
struct GenerationDefaults {
    std::optional<float> temperature, top_p, min_p, repetition_penalty;
    std::optional<int> top_k;
    bool greedy = false;  // do_sample: false
    std::vector<int32_t> eos_ids;
    std::string origin;  // "generation_config.json" or "built in (no generation_config.json)"
};

struct LoadProgress {
    int64_t bytes_done = 0;
    int64_t bytes_total = 0;
};

class Model;

struct LoadOptions {
    bool tokenizer = true;  // false: token ids only
    std::string text_from;  // synthetic weights: the directory whose tokenizer they get; empty: none
    bool weights = true;    // false: they are neither read nor placed; the model can be planned for, not run
    /// Format for the attention and DeltaNet projections and the head where they are stored in 16 or 32 bits.
    /// Throws Error(usage) if none of them is. Random weights are made in it.
    DenseFormat dense = DenseFormat::as_stored;
    std::function<void(const LoadProgress&)> progress;
    /// Called when everything but the weights' data is known and checked: what throws here has read no
    /// weights.
    std::function<void(const Model&)> before_weights;
};

/// What a part of the model's weights is for, and how much of it one decoded token reads. One of the pointers
/// is set.
struct WeightUse {
    const char* group;  // "attention", "DeltaNet", "routed experts", "shared experts", "router", "MLP",
                        // "embedding", ...
    const Weight* matrix = nullptr;
    const ExpertWeights* experts = nullptr;
    const Tensor* vector = nullptr;
    RowOrder order = RowOrder::stacked;
    int64_t picked = 0;  // experts, or rows of the embedding, that each token picks; 0: it reads all
    bool again = false;  // memory that another use has counted: a head tied to the embedding

    /// As stored in the checkpoint.
    int64_t bytes() const;
    int64_t parameters() const;
    /// Part of it that a step of `tokens` independent tokens reads, 0 to 1; expected, if they pick at random.
    double share(int64_t tokens) const;
};

class Model {
  public:
    virtual ~Model() = default;
    virtual const ModelInfo& info() const = 0;
    virtual const GenerationDefaults& generation() const = 0;
    /// Null if loaded without one.
    virtual const Tokenizer* tokenizer() const = 0;
    virtual const Audit& audit() const = 0;
    /// One-line remarks for the user: an unknown chat template, unused vision tensors ...
    virtual const std::vector<std::string>& notes() const = 0;
    /// Of the configuration and of the beginning of every tensor: other weights have another digest.
    virtual uint64_t digest() const = 0;
    /// Every weight, in the order of placing within each layer.
    virtual std::vector<WeightUse> weight_uses() const = 0;
    /// Bytes that the backend needs for the weights as stored beyond those for LoadOptions::dense.
    virtual int64_t extra_bytes_as_stored() const = 0;
    /// A checkpoint loaded with LoadOptions::dense first runs as it is stored, so that both can be compared
    /// (info() tells of the other form from the beginning). Changes it, matrix by matrix; what was built
    /// before may not run any more. Throws Error(model) if a weight is not finite.
    virtual void requantize(const std::function<void(const LoadProgress&)>& progress) = 0;
    virtual std::vector<StateSpec> state_specs(const StateOptions& options) const = 0;
    virtual BuiltGraph build(const BatchShape& shape, const StateViews& state, DType activations) const = 0;
};

/// `path`: a directory, a file in it, or a repo id in the local Hugging Face cache. Places the weights on
/// `backend`. Throws Error(model) unless every tensor and byte of the checkpoint is accounted for.
std::unique_ptr<Model> load_model(const std::string& path, Backend& backend, const LoadOptions& options);

/// Random weights in the shapes and formats of a real checkpoint, made where they will be used
/// (models/synthetic.h).
std::unique_ptr<Model> load_synthetic(const std::string& name, const std::string& mix, Backend& backend,
                                      const LoadOptions& options);

}  // namespace quern
