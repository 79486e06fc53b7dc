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
#include "models/layer_range.h"
#include "models/model_weights.h"
#include "models/shard.h"
#include "models/vision.h"

namespace quern {

class Tokenizer;
struct Audit;
struct ChatFormat;

/// text: the model; hidden: the model, which leaves hidden states for its MTP layer, and of prompts that layer's keys and
/// values; mtp: the MTP layer alone, which guesses the token after the next one, and applied to itself further ones; taps: the
/// model, whose rows also get the DFlash drafter's keys and values; dflash: blocks of that drafter, each the newest token of a
/// sequence and masks.
enum class Pass : uint8_t { text, hidden, mtp, taps, dflash };

/// Which rows of the head drafts are chosen from (draft_head.h): of tokens that occur most, of all that have a copy, or the model's
/// own head (of several ranks: what has a copy, if anything has). Those that a model does not have are the next ones that it has.
enum class DraftRows : uint8_t { frequent, copied, all };

/// The sizes of one step. Each shape needs a plan of its own.
struct BatchShape {
    StepKind kind = StepKind::prompt;
    int64_t tokens = 0;
    int64_t sequences = 0;
    int64_t logit_rows = 0;
    int64_t pages = 0;      // columns of the page table: the most pages a sequence may have
    int64_t vocab = 0;      // ids that may be sampled
    bool images = false;    // prompts: rows may be of images; others have none
    bool verifies = false;  // answers: rows may be drafts, which the next step commits or drops
    Pass pass = Pass::text;
    /// Of mtp: tokens that each sequence drafts after its last row; 0: the pass only writes the rows' keys and values.
    int64_t drafts = 0;
    /// Of mtp and dflash: the tokens that may be drafted.
    DraftRows draft_rows = DraftRows::frequent;
    /// Of mtp and dflash: DraftRows::all, and their logits are outputs.
    bool full_head = false;
    /// Of dflash, where its config does not say it: whether rows of a block in layers with windows see none after them.
    bool causal_windows = false;
    /// The residual stream of all rows is there after every layer, on each rank. Else a rank has that of prompts' rows that it adds up
    /// itself, and one device that has the whole model may leave out rows of the last layer (narrows).
    bool whole_residual = false;
    /// Whether the last layer may leave out rows whose logits nobody wants.
    bool narrows() const { return kind == StepKind::prompt && logit_rows < tokens && !whole_residual; }
    auto operator<=>(const BatchShape&) const = default;
};

/// hidden: hidden states of a sequence's last tokens, by position in a ring: the MTP layer needs each with the token after it.
/// drafts: of all slots together, the ids that the last pass that drafted left, in its order. chosen: what the last step that
/// verified drafts chose, if it chose the highest logits (ops/accept_drafts.h).
enum class StateRole : uint8_t {
    key,
    value,
    conv,
    delta,
    hidden,
    journal_k,
    journal_u,
    journal_g,
    drafts,
    chosen
};

/// Positions of a sequence whose hidden states are kept, for the MTP layer.
inline constexpr int64_t kHiddenRing = 32;

/// One state tensor of one layer, for one slot (a sequence) or one page (64 tokens of KV).
struct StateSpec {
    int layer;
    StateRole role;
    DType dtype;
    bool paged;                  // outer dimension: pages, else slots
    std::vector<int64_t> shape;  // without the outer dimension
    int stage = 0;               // of a model that several devices hold by layers: which of them has it

    int64_t bytes() const;
    /// From one step to the next only: no part of a sequence's state.
    bool transient() const { return role >= StateRole::journal_k; }
};

/// Formats of keys and of values (ggml-like/kv_format.h).
struct KvTypes {
    DType k, v;
    KvTypes(DType both) : k(both), v(both) {}
    KvTypes(DType keys, DType values) : k(keys), v(values) {}
    friend bool operator==(const KvTypes&, const KvTypes&) = default;
};

struct StateOptions {
    KvTypes kv = DType::BF16;
    DType conv = DType::BF16;  // of the convolution's stored inputs; the recurrent state is always F32
    int journal = 0;           // entries a slot, for speculation
    bool mtp = false;          // also the MTP layer's, whose layer number follows the last one
    bool dflash = false;       // also the DFlash drafter's, whose layer number is the one after that
};

/// Where each layer's state lives; the engine's StatePool fills it.
class StateViews {
  public:
    virtual ~StateViews() = default;
    /// Tensor of Place::state with the outer dimension in front; throws if the pool has none.
    virtual Tensor find(int layer, StateRole role) const = 0;
    virtual bool has(int layer, StateRole role) const = 0;
};

/// What an engine fills and reads of Pass::mtp, beside the batch, whose row of position p has the token of p + 1.
struct MtpTensors {
    Tensor* ring_rows = nullptr;  // I32 [tokens]: slot * kHiddenRing + position % kHiddenRing of each row
    // Of passes that draft. Row s of the later forward passes is sequence s of the batch.
    Tensor* last_rows = nullptr;        // I32 [sequences], if there are more rows: each sequence's last one
    Tensor* later_positions = nullptr;  // I32 [drafts - 1, sequences], if there are any: of each later row
    Tensor* later_rope = nullptr;  // the same shape, of models that read images: by what these rows rotate
    Tensor* later_sequence = nullptr;  // I32 [sequences]: s; -1: padding
    Tensor* later_start = nullptr;     // I32 [sequences + 1]
    Tensor* drafts = nullptr;          // I32 [drafts, sequences], an output: ids
    std::vector<Tensor*> logits = {};  // with full_head, of each forward pass: F32 [sequences, vocab rows]
};

struct BuiltGraph {
    Graph graph;
    Batch batch;  // inputs to fill
    Tensor* logits =
        nullptr;  // F32 [logit_rows, vocab rows], of a shard its equal part of these; null: none are wanted
    /// I32 [logit_rows, kTopWords]: ops/logits_top.h; of a shard ids count from its first row. Of Pass::dflash I32 [logit_rows], ids; its logits with full_head only.
    Tensor* top = nullptr;
    /// Prompts of Pass::hidden: I32 [tokens], the token after each row; any where it is unknown.
    Tensor* next_ids = nullptr;
    /// Beside next_ids, with BatchShape::images: I32 [tokens], as Batch::image_source, of the token after each row.
    Tensor* next_source = nullptr;
    MtpTensors mtp;
    /// Of a device that holds some of the layers: what it goes on from, where it is not the first, and what it leaves, where it is
    /// not the last, which has no logits then: its rows, with Pass::taps also what was tapped so far. The next one's are of the
    /// same shapes, in the same order.
    std::vector<Tensor*> arriving, leaving;
};

/// A DFlash drafter beside a model.
struct DraftModelInfo {
    std::string name;
    int64_t block = 0;            // rows of a block at most
    int32_t mask = 0;             // token id
    bool causality_open = false;  // BatchShape::causal_windows matters
    std::vector<int64_t> taps;    // layers of the model that it reads
};

/// The tokens that a smaller head for drafting has rows of (draft_head.h).
struct DraftTokens {
    int64_t frequent = 0, copied = 0;  // tokens 0 and up; frequent == copied: they are the same rows
    int64_t added = 0;                 // and these from there on
    bool whole_too = true;             // whether passes can draft by the model's own head instead

    bool has(DraftRows rows, int32_t token) const {
        return rows == DraftRows::all || token >= added ||
               token < (rows == DraftRows::frequent ? frequent : copied);
    }
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
    std::optional<DraftTokens> draft_tokens;     // of a smaller head to draft with, if there is one
    std::optional<DraftModelInfo> dflash;        // whether Pass::taps and Pass::dflash can be built
    std::optional<VisionInfo> vision;            // whether images can be read
};

/// From generation_config.json; empty where the file says nothing.
struct GenerationDefaults {
    std::optional<float> temperature, top_p, min_p, repetition_penalty;
    std::optional<int> top_k;
    bool greedy = false;  // do_sample: false
    std::vector<int32_t> eos_ids;
    std::string origin;  // "generation_config.json" or "built in (no generation_config.json)"
};

/// As of --draft-head short.
inline constexpr int64_t kDraftHeadBytes = 200'000'000;
inline constexpr int64_t kFrequentTokens = 65536;  // draft_head.h says why

/// Whether the MTP layer is read: no; if there is one that can be read, else a note says why not; or Error(model).
enum class MtpUse : uint8_t { none, if_readable, required };

struct OpenOptions {
    bool tokenizer = true;  // false: token ids only
    /// In place of one of its own: that of another replica of the same model, which must outlive this one.
    const Tokenizer* shared_tokenizer = nullptr;
    std::string text_from;  // random weights: the directory with their tokenizer; empty: none
    /// The format that attention and DeltaNet projections and the head get where they are stored in 16 or 32 bits.
    /// Error(usage) if none of them is. Random weights are made in it.
    DenseFormat dense = DenseFormat::as_stored;
    int threads = 1;  // to read and check with
    MtpUse mtp = MtpUse::none;
    bool vision = false;  // read the vision tower, if there is one: whole, or Error(model)
    /// The format that the tower's matrices get where they are stored in 16 or 32 bits.
    DenseFormat vision_format = DenseFormat::as_stored;
    /// Bytes that a smaller head for drafting may take, if there is an MTP layer or drafter and the model's head is larger (draft_head.h);
    /// 0: drafts come from the model's own head.
    int64_t draft_head_bytes = kDraftHeadBytes;
    /// Tokens from 0 on whose rows of that are also a head by themselves.
    int64_t draft_frequent = kFrequentTokens;
    /// The format that a DFlash drafter's layers get where stored in 16 or 32 bits, made when placed; an MTP layer: ModelWeights::plan_drafters.
    DenseFormat draft_format = DenseFormat::as_stored;
    /// Of several ranks: the part that this model is. Error(usage) if they cannot share it. An MTP layer or drafter is on
    /// rank 0, whole.
    Shard shard;
    /// A DFlash drafter: its checkpoint as of open_model or, for random weights, the name of a shape; empty: none.
    std::string draft_model;
};

/// The inputs of a step of this shape, named as in ops/batch.h. `width`: of a model that reads images, its width; else 0.
Batch declare_batch(Graph& g, const BatchShape& shape, int64_t width = 0);

/// Of a layer that drafts: StateRole::drafts, with room for sequences that are padded to twice as many, and chosen.
std::vector<StateSpec> draft_specs(int layer);
/// A pass's drafts, I32 of this shape, at the beginning of StateRole::drafts.
Tensor* draft_ids(Graph& g, const StateViews& state, int layer, std::initializer_list<int64_t> shape);
/// The tensor as a vector.
Tensor flat(const Tensor& t);

/// Rows of images that a step may read at most: its own, and the one after each slice.
inline int64_t image_row_limit(const BatchShape& shape) { return shape.tokens + shape.sequences; }

class Model {
  public:
    virtual ~Model() = default;
    /// A group (model_group.h) is several ranks' parts of one model; then what is said of weights, and built, is of rank 0.
    virtual Model& of_rank(int) { return *this; }
    virtual const Model& of_rank(int) const { return *this; }
    /// Several devices' parts of one model by layers (stage_models.h); then weights are of all, and graphs are built by one.
    virtual int stages() const { return 1; }
    virtual Model& of_stage(int) { return *this; }
    virtual const Model& of_stage(int) const { return *this; }
    /// The layers that are placed and built.
    virtual LayerRange own_layers() const { return {0, static_cast<int>(info().layers)}; }
    /// Leaves these layers, with the first the embedding and the tower, with the last one the head and what drafts, with an
    /// embedding of its own; info() stays the whole model's. For a model that is not placed yet. Throws Error(usage).
    virtual void keep_layers(const LayerRange& range);
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
    /// With ModelInfo::vision: an image, resized to what its tower reads within `sizes`. Throws Error(usage).
    ImagePart read_image(Image image, const ImageSizes& sizes) const;
    /// The tower, or a part of it.
    virtual VisionGraph build_vision(const VisionShape& shape, DType activations) const = 0;
};

/// `path`: a directory, a file in it, or a repo id in the local Hugging Face cache. Reads and checks everything but
/// the weights' data: enough to plan with; models/weight_placement.h makes it run. Throws Error(model) unless the
/// family is known (models/families.h) and every tensor and byte is accounted for.
std::unique_ptr<Model> open_model(const std::string& path, const OpenOptions& options);

/// Random weights in the shapes and formats of a real checkpoint (models/synthetic.h). The backend makes them.
std::unique_ptr<Model> open_synthetic(const std::string& name, const std::string& mix,
                                      const OpenOptions& options);

}  // namespace quern
