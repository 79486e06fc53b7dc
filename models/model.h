// Model: what an engine needs from any checkpoint: a summary, its tokenizer and chat format, state sizes, build().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ggml-like/graph.h"
#include "ggml-like/ops/batch.h"
#include "models/model_weights.h"

namespace quern {

class Tokenizer;
struct Audit;
struct ChatFormat;

/// text: the model; hidden: the model, of which the hidden states are read, too; mtp: its MTP layer alone, which guesses the
/// token after the next one.
enum class Pass : uint8_t { text, hidden, mtp };

/// The sizes of one step. Each shape needs a plan of its own.
struct BatchShape {
    StepKind kind = StepKind::prompt;
    int64_t tokens = 0;
    int64_t sequences = 0;
    int64_t logit_rows = 0;
    int64_t pages = 0;  // columns of the page table: the most pages a sequence may have
    int64_t vocab = 0;  // ids that may be sampled
    /// Of mtp, logit_rows is 0 or tokens: with 0 it only writes the rows' keys and values.
    Pass pass = Pass::text;
    auto operator<=>(const BatchShape&) const = default;
};

/// hidden: the hidden state of a sequence's last token, which the MTP layer needs with the token after it.
enum class StateRole : uint8_t { key, value, conv, delta, hidden, journal_k, journal_u, journal_g };

/// One state tensor of one layer, for one slot (a sequence) or one page (64 tokens of KV).
struct StateSpec {
    int layer;
    StateRole role;
    DType dtype;
    bool paged;                  // outer dimension: pages, else slots
    std::vector<int64_t> shape;  // without the outer dimension

    int64_t bytes() const;
    bool journal() const { return role >= StateRole::journal_k; }
};

struct StateOptions {
    DType kv = DType::BF16;
    DType conv = DType::BF16;  // of the convolution's stored inputs; the recurrent state is always F32
    int journal = 0;           // entries a slot, for speculation
    bool mtp = false;          // also the MTP layer's, whose layer number follows the last one
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
    /// Pass::hidden, and Pass::mtp with logits: F32 [tokens, width], what the last layer leaves, before its norm.
    Tensor* hidden = nullptr;
    /// Pass::mtp: an input [tokens, width] of the activations' type, filled by Model::normed_hidden.
    Tensor* normed_hidden = nullptr;
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
    int64_t vocab = 0;       // ids that may be sampled: the tokenizer's, or vocab_rows without one
    int64_t context = 0;     // positions the model was made for
    int64_t parameters = 0;
    int64_t weight_bytes = 0;                    // of the text model, as stored
    int64_t token_bytes = 0;                     // weights read for one decoded token
    DenseFormat dense = DenseFormat::as_stored;  // OpenOptions::dense
    bool mtp = false;                            // whether Pass::mtp can be built
};

/// From generation_config.json; empty where the file says nothing.
struct GenerationDefaults {
    std::optional<float> temperature, top_p, min_p, repetition_penalty;
    std::optional<int> top_k;
    bool greedy = false;  // do_sample: false
    std::vector<int32_t> eos_ids;
    std::string origin;  // "generation_config.json" or "built in (no generation_config.json)"
};

/// Whether the MTP layer is read: no; if there is one that can be read, else a note says why not; or Error(model).
enum class MtpUse : uint8_t { none, if_readable, required };

struct OpenOptions {
    bool tokenizer = true;  // false: token ids only
    std::string text_from;  // random weights: the directory with their tokenizer; empty: none
    /// The format that attention and DeltaNet projections and the head get where they are stored in 16 or 32 bits.
    /// Error(usage) if none of them is. Random weights are made in it.
    DenseFormat dense = DenseFormat::as_stored;
    int threads = 1;  // to read and check with
    MtpUse mtp = MtpUse::none;
};

class Model {
  public:
    virtual ~Model() = default;
    virtual const ModelInfo& info() const = 0;
    virtual const GenerationDefaults& generation() const = 0;
    /// Null if loaded without one.
    virtual const Tokenizer* tokenizer() const = 0;
    /// The format of conversations that the model was trained with.
    virtual const ChatFormat& chat() const = 0;
    virtual const Audit& audit() const = 0;
    /// One-line remarks for the user: an unknown chat template, unused vision tensors ...
    virtual const std::vector<std::string>& notes() const = 0;
    /// A hash of the configuration and of the beginning of every tensor: other weights have another digest.
    virtual uint64_t digest() const = 0;
    virtual const ModelWeights& weights() const = 0;
    virtual ModelWeights& weights() = 0;
    /// Reads and checks all scales of these weights. Throws Error(model) if they cannot be right.
    virtual void check_weights(std::span<const Weight* const> list, int threads) const = 0;
    virtual std::vector<StateSpec> state_specs(const StateOptions& options) const = 0;
    virtual BuiltGraph build(const BatchShape& shape, const StateViews& state, DType activations) const = 0;
    /// What Pass::mtp reads of a row of BuiltGraph::hidden that `from` left: `row` and `out` [width]. Only with
    /// ModelInfo::mtp.
    virtual void normed_hidden(Pass from, const float* row, float* out) const;
};

/// `path`: a directory, a file in it, or a repo id in the local Hugging Face cache. Reads and checks everything but
/// the weights' data: enough to plan with; models/weight_placement.h makes it run. Throws Error(model) unless the
/// family is known (models/families.h) and every tensor and byte is accounted for.
std::unique_ptr<Model> open_model(const std::string& path, const OpenOptions& options);

/// Random weights in the shapes and formats of a real checkpoint (models/synthetic.h). The backend makes them.
std::unique_ptr<Model> open_synthetic(const std::string& name, const std::string& mix,
                                      const OpenOptions& options);

}  // namespace quern
