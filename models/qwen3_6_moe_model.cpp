// The Model of a Qwen3.6 checkpoint: open, read, check, place, remember.
#include <algorithm>
#include <future>
#include <set>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/parallel.h"
#include "models/chat_format.h"
#include "models/config_check.h"
#include "models/generation_config.h"
#include "models/qwen3_6_moe.h"
#include "models/synthetic.h"
#include "models/tokenizer.h"
#include "models/weight_format.h"

namespace quern {
namespace {

/// f(group, weight, row order) for the matrices of a layer that every token reads.
template <typename Layer, typename F>
void for_each_dense(Layer& w, F&& f) {
    const auto each = [&](const char* group, auto& weight, RowOrder order) {
        if (weight) f(group, weight, order);
    };
    each("attention", w.attention.in_proj, RowOrder::stacked);
    each("attention", w.attention.out_proj, RowOrder::stacked);
    each("DeltaNet", w.delta.in_proj, RowOrder::stacked);
    each("DeltaNet", w.delta.out_proj, RowOrder::stacked);
    each("router", w.moe.router, RowOrder::stacked);
    each("shared experts", w.moe.shared_gate_up, RowOrder::paired);
    each("shared experts", w.moe.shared_down, RowOrder::stacked);
    each("MLP", w.mlp.gate_up, RowOrder::paired);
    each("MLP", w.mlp.down, RowOrder::stacked);
}

/// f(weight) for what LoadOptions::dense is about.
template <typename F>
void for_each_projection(Qwen36MoeWeights& weights, F&& f) {
    for (LayerWeights& w : weights.layers)
        for (Weight* p : {&w.attention.in_proj, &w.attention.out_proj, &w.delta.in_proj, &w.delta.out_proj})
            if (*p) f(*p);
    f(weights.head);
}

template <typename F>
void for_each_expert(LayerWeights& w, F&& f) {
    for (Weight& expert : w.moe.gate_up.expert) f(expert);
    for (Weight& expert : w.moe.down.expert) f(expert);
}

template <typename Weights, typename F>
void for_each_vector(Weights& w, F&& f) {
    for (auto& l : w.layers)
        for (auto* t : {&l.input_norm, &l.post_norm, &l.attention.q_norm, &l.attention.k_norm, &l.delta.conv,
                        &l.delta.decay_rate, &l.delta.dt_bias, &l.delta.norm})
            if (t->data != nullptr) f(*t);
    f(w.final_norm);
}

int64_t aligned(int64_t bytes) { return (bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment; }

class Qwen36Moe final : public Model {
  public:
    Qwen36Moe(const std::string& path, Backend& backend, const LoadOptions& options)
        : checkpoint_(Checkpoint::open(path, backend.threads())),
          backend_(backend),
          config_(parse_qwen3_6_moe_config(checkpoint_->config(), checkpoint_->files().config)) {
        std::future<void> text_side;  // takes longer than all the rest; its errors come last
        if (options.tokenizer)
            text_side = std::async([this] { load_text_side(checkpoint_->files().directory); });
        bind_weights();
        if (text_side.valid()) text_side.get();
        generation_ = read_generation_defaults(*checkpoint_, config_.eos_ids, config_.vocab_rows);
        add_chat_end();
        std::string directory = checkpoint_->files().directory;
        while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
        plan_requantizing(options.dense);
        summarize(directory.substr(directory.find_last_of('/') + 1));
        if (options.before_weights) options.before_weights(*this);
        if (options.weights) {
            for (Change& c : changes_) std::swap(*c.weight, c.other);
            check_and_place(options);
        }
        notes_.insert(notes_.end(), checkpoint_->notes().begin(), checkpoint_->notes().end());
        notes_.insert(notes_.end(), audit_.notes.begin(), audit_.notes.end());
    }

    /// Random weights: no checkpoint. Sampled as the real ones are (generation_config.json of Qwen3.6):
    /// drawing from all ids would measure something else.
    Qwen36Moe(const std::string& name, const std::string& mix, Backend& backend, const LoadOptions& options)
        : backend_(backend), config_(synthetic_config(name)) {
        weights_ = synthetic_weights(config_, mix, floats_);
        generation_ = {
            .temperature = 1.0f, .top_p = 0.95f, .top_k = 20, .origin = "built in: synthetic weights"};
        if (options.tokenizer && !options.text_from.empty()) load_text_side(options.text_from);
        add_chat_end();
        plan_requantizing(options.dense);
        changes_.clear();  // nothing is stored: they are made in the new format
        summarize(fmt::format("synthetic {} ({})", name, mix));
        if (options.before_weights) options.before_weights(*this);
        if (options.weights) check_and_place(options);
    }

    const ModelInfo& info() const override { return info_; }
    const GenerationDefaults& generation() const override { return generation_; }
    const Tokenizer* tokenizer() const override { return tokenizer_ ? &*tokenizer_ : nullptr; }
    const Audit& audit() const override { return audit_; }
    const std::vector<std::string>& notes() const override { return notes_; }
    uint64_t digest() const override {
        constexpr uint64_t kBeginning = 4096;  // a page of the mapping
        ContentHash hash;
        if (!checkpoint_) {  // the name says all of it
            hash.add(info_.name);
            hash.add(static_cast<int64_t>(info_.dense));
            return hash.value();
        }
        if (info_.dense != DenseFormat::as_stored) hash.add(static_cast<int64_t>(info_.dense));
        hash.add(checkpoint_->config_text());
        for (const CheckpointTensor& t : checkpoint_->tensors()) {
            hash.add(t.name);
            hash.add(describe(*t.tensor));
            hash.add(t.tensor->data, std::min(t.tensor->bytes(), kBeginning));
        }
        return hash.value();
    }
    std::vector<WeightUse> weight_uses() const override {
        std::vector<WeightUse> uses;
        const int64_t used = config_.experts_used;
        for (const LayerWeights& layer : weights_.layers) {
            for_each_dense(layer, [&](const char* group, const Weight& w, RowOrder order) {
                uses.push_back({.group = group, .matrix = &w, .order = order});
            });
            if (config_.dense()) continue;
            uses.push_back({.group = "routed experts",
                            .experts = &layer.moe.gate_up,
                            .order = RowOrder::paired,
                            .picked = used});
            uses.push_back({.group = "routed experts", .experts = &layer.moe.down, .picked = used});
        }
        uses.push_back({.group = "embedding", .matrix = &weights_.embedding, .picked = 1});
        uses.push_back({.group = "head", .matrix = &weights_.head, .again = head_is_embedding()});
        for_each_vector(weights_, [&](const Tensor& t) { uses.push_back({.group = "norms", .vector = &t}); });
        return uses;
    }
    int64_t extra_bytes_as_stored() const override {
        int64_t extra = 0;
        for (const Change& c : changes_) {
            if (!c.shared) extra += backend_.placed_bytes(c.other, RowOrder::stacked);
            extra -= backend_.placed_bytes(*c.weight, RowOrder::stacked);
        }
        return extra;
    }
    void requantize(const std::function<void(const LoadProgress&)>& progress) override {
        LoadProgress done;
        for (const Change& c : changes_) done.bytes_total += c.weight->bytes();
        for (Change& c : changes_) {
            auto memory = quern::requantize(*c.weight, c.other, backend_.threads());
            if (!c.shared) c.other.placed = c.weight->placed;  // to be given back
            done.bytes_done += c.weight->bytes();
            *c.weight = std::move(c.other);
            backend_.place_apart(*c.weight, RowOrder::stacked);
            if (c.weight->placed == nullptr)
                requantized_.push_back(std::move(memory));  // read where it is
            else
                for (WeightSegment& s : c.weight->segments) s.data = s.scale = nullptr;
            if (progress) progress(done);
        }
        changes_.clear();
        backend_.weights_complete();
    }
    std::vector<StateSpec> state_specs(const StateOptions& options) const override {
        return qwen3_6_moe_state(config_, options);
    }
    BuiltGraph build(const BatchShape& shape, const StateViews& state, DType activations) const override {
        return build_qwen3_6_moe(config_, weights_, shape, state, activations);
    }

  private:
    /// Finds every weight in the checkpoint and accounts for all of it.
    void bind_weights() {
        TensorUse use(*checkpoint_);
        Audit claims;  // of the configuration
        for_each_parallel(backend_.threads(), 2, [&](size_t i) {
            if (i == 0)
                weights_ = read_qwen3_6_moe_weights(*checkpoint_, config_, use, backend_.threads());
            else
                check_config(*checkpoint_, config_, claims);
        });
        audit_ = use.audit();
        audit_.problems.insert(audit_.problems.end(), claims.problems.begin(), claims.problems.end());
        audit_.notes.insert(audit_.notes.end(), claims.notes.begin(), claims.notes.end());
        audit_.require_ok();
        floats_ = use.take_floats();
    }

    void load_text_side(const std::string& directory) {
        tokenizer_.emplace(Tokenizer::load(directory, config_.vocab_rows, backend_.threads()));
        if (std::string note = known_template_note(directory); !note.empty())
            notes_.push_back(std::move(note));
    }

    /// A matrix of LoadOptions::dense: `other` is its new form, or after a swap what the checkpoint has.
    struct Change {
        Weight* weight;
        Weight other;
        bool shared;  // the head of a tied checkpoint: stored, it is the embedding's memory
    };

    /// From here to the load, weights have their new form, without data.
    void plan_requantizing(DenseFormat format) {
        info_.dense = format;
        if (format == DenseFormat::as_stored) return;
        for_each_projection(weights_, [&](Weight& w) {
            if (!can_requantize(w, format)) return;
            changes_.push_back({&w, requantized_form(w, format), &w == &weights_.head && config_.tied_head});
            std::swap(w, changes_.back().other);
        });
        if (changes_.empty())
            FAIL(usage,
                 "--dense {}: the attention and DeltaNet projections and the head of this checkpoint are "
                 "quantized "
                 "already; leave it out",
                 dense_format_name(format));
    }
    bool changed(const Weight& w) const {
        return std::any_of(changes_.begin(), changes_.end(), [&](const Change& c) { return c.weight == &w; });
    }
    bool head_is_embedding() const {
        return config_.tied_head && weights_.head.segments[0].dtype == weights_.embedding.segments[0].dtype;
    }

    /// Hands a layer's weights to the backend in the row order that their ops read.
    void place_layer(LayerWeights& w) {
        for_each_dense(w, [&](const char*, Weight& dense, RowOrder order) { place(dense, order); });
        if (w.moe.gate_up.expert.empty()) return;
        backend_.place_experts(w.moe.gate_up, RowOrder::paired);
        backend_.place_experts(w.moe.down, RowOrder::stacked);
    }
    void place(Weight& w, RowOrder order) {
        if (changed(w))
            backend_.place_apart(w, order);
        else
            backend_.place_weight(w, order);
    }

    /// Reads every scale once and hands the weights to the backend, layer by layer so that progress can be
    /// told.
    void check_and_place(const LoadOptions& options) {
        reserve_memory();
        LoadProgress progress;
        std::vector<Weight*> ends = {&weights_.embedding};
        if (!head_is_embedding()) ends.push_back(&weights_.head);
        std::vector<std::vector<Weight*>> groups;
        for (LayerWeights& layer : weights_.layers) {
            auto& group = groups.emplace_back();
            for_each_dense(layer, [&](const char*, Weight& w, RowOrder) { group.push_back(&w); });
            for_each_expert(layer, [&](Weight& w) { group.push_back(&w); });
        }
        groups.push_back(ends);
        for (const auto& group : groups)
            for (const Weight* w : group) progress.bytes_total += w->bytes();
        for (size_t i = 0; i < groups.size(); ++i) {
            check(groups[i], backend_.threads());
            if (i < weights_.layers.size())
                place_layer(weights_.layers[i]);
            else
                for (Weight* w : ends) place(*w, RowOrder::stacked);
            for (const Weight* w : groups[i]) progress.bytes_done += w->bytes();
            if (options.progress) options.progress(progress);
        }
        backend_.weights_complete();
        if (head_is_embedding()) {
            weights_.head = weights_.embedding;
            weights_.head.name = "head";
        }
        place_vectors();
    }

    void reserve_memory() {
        int64_t bytes = 0;
        for (const WeightUse& use : weight_uses()) {
            if (use.again || use.vector != nullptr || (use.matrix != nullptr && changed(*use.matrix)))
                continue;
            bytes += use.matrix != nullptr ? backend_.placed_bytes(*use.matrix, use.order)
                                           : backend_.placed_bytes(*use.experts, use.order);
        }
        if (bytes > 0) backend_.reserve_weights(bytes);
        int64_t vectors = 0;
        for_each_vector(weights_, [&](const Tensor& t) { vectors += aligned(t.bytes()); });
        vectors_.reset(backend_.alloc(vectors, "norms"), [this](void* memory) { backend_.free(memory); });
    }

    void place_vectors() {
        auto* memory = static_cast<std::byte*>(vectors_.get());
        for_each_vector(weights_, [&](Tensor& t) {
            backend_.upload(memory, t.data, t.bytes());
            t.data = memory;
            memory += aligned(t.bytes());
        });
        backend_.synchronize();
    }

    void check(const std::vector<Weight*>& group, int threads) {
        std::vector<const WeightSegment*> segments;
        for (const Weight* w : group)
            for (const WeightSegment& s : w->segments) segments.push_back(&s);
        if (!checkpoint_) return;
        const ScaleCheck result = check_scales(*checkpoint_, segments, threads);
        if (result.problems.empty()) return;
        std::string text = result.problems[0];
        if (result.problems.size() > 1)
            text += fmt::format(" (and {} more like it)", result.problems.size() - 1);
        FAIL(model, "{}", text);
    }

    /// A chat turn ends with these, whatever the configurations name: config.json alone names the document's
    /// end.
    void add_chat_end() {
        if (!tokenizer_) return;
        std::vector<int32_t>& ids = generation_.eos_ids;
        for (const char* marker : {"<|im_end|>", "<|endoftext|>"}) {
            const auto id = tokenizer_->find_added(marker);
            if (id && std::find(ids.begin(), ids.end(), *id) == ids.end()) ids.push_back(*id);
        }
    }

    void summarize(const std::string& name) {
        ModelInfo& i = info_;
        i.name = name;
        i.architecture = config_.architecture();
        i.layers = config_.layers;
        i.attention_layers = std::count(config_.full_attention.begin(), config_.full_attention.end(), true);
        i.width = config_.width;
        i.experts = config_.experts;
        i.experts_used = config_.experts_used;
        i.vocab_rows = config_.vocab_rows;
        i.vocab = tokenizer_ ? std::min(tokenizer_->size(), config_.vocab_rows) : config_.vocab_rows;
        i.context = config_.context;
        count_weights();
    }

    void count_weights() {
        std::set<std::string> formats;
        const auto count_formats = [&](const Weight& w) {
            for (const WeightSegment& s : w.segments) formats.insert(dtype_name(s.dtype));
        };
        double token_bytes = 0;
        for (const WeightUse& use : weight_uses()) {
            token_bytes += use.share(1) * static_cast<double>(use.bytes());
            if (use.again) continue;
            info_.parameters += use.parameters();
            info_.weight_bytes += use.bytes();
            if (use.matrix != nullptr) count_formats(*use.matrix);
            if (use.experts != nullptr)
                for (const Weight& w : use.experts->expert) count_formats(w);
        }
        info_.token_bytes = static_cast<int64_t>(token_bytes);
        for (const std::string& f : formats) info_.formats += (info_.formats.empty() ? "" : " + ") + f;
    }

    std::optional<Checkpoint> checkpoint_;  // keeps the mapping that the weights point into; none: synthetic
    Backend& backend_;
    Qwen36MoeConfig config_;
    Qwen36MoeWeights weights_;
    std::vector<std::unique_ptr<float[]>> floats_;
    std::shared_ptr<void> vectors_;  // all norms and other small vectors, on the backend
    Audit audit_;
    std::optional<Tokenizer> tokenizer_;
    GenerationDefaults generation_;
    ModelInfo info_;
    std::vector<std::string> notes_;
    std::vector<Change> changes_;                            // still to be made
    std::vector<std::unique_ptr<std::byte[]>> requantized_;  // that the backend reads in place
};

}  // namespace

std::unique_ptr<Model> load_model(const std::string& path, Backend& backend, const LoadOptions& options) {
    return std::make_unique<Qwen36Moe>(path, backend, options);
}

std::unique_ptr<Model> load_synthetic(const std::string& name, const std::string& mix, Backend& backend,
                                      const LoadOptions& options) {
    return std::make_unique<Qwen36Moe>(name, mix, backend, options);
}

}  // namespace quern
