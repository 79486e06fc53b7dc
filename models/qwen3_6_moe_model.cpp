// The Model of a Qwen3.6 checkpoint.
#include <algorithm>
#include <cmath>
#include <future>
#include <set>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/parallel.h"
#include "models/chat_format.h"
#include "models/config_check.h"
#include "models/dflash.h"
#include "models/families.h"
#include "models/generation_config.h"
#include "models/qwen3_6_moe.h"
#include "models/synthetic.h"
#include "models/tokenizer.h"
#include "models/weight_format.h"

namespace quern {
namespace {

void list_attention(std::vector<WeightUse>& uses, int layer, AttentionWeights& w) {
    for (Weight* matrix : {&w.in_proj, &w.out_proj})
        uses.push_back({.group = "attention", .layer = layer, .matrix = matrix, .projection = true});
}

void list_delta(std::vector<WeightUse>& uses, int layer, DeltaWeights& w) {
    for (Weight* matrix : {&w.in_proj, &w.out_proj})
        uses.push_back({.group = "DeltaNet", .layer = layer, .matrix = matrix, .projection = true});
}

void list_moe(std::vector<WeightUse>& uses, int layer, MoeWeights& w, int64_t picked) {
    const auto matrix = [&](const char* group, Weight& weight, RowOrder order) {
        uses.push_back({.group = group, .layer = layer, .matrix = &weight, .order = order});
    };
    const auto experts = [&](ExpertWeights& weights, RowOrder order) {
        uses.push_back({.group = "routed experts",
                        .layer = layer,
                        .experts = &weights,
                        .order = order,
                        .picked = picked});
    };
    matrix("router", w.router, RowOrder::stacked);
    matrix("shared experts", w.shared_gate_up, RowOrder::paired);
    matrix("shared experts", w.shared_down, RowOrder::stacked);
    experts(w.gate_up, RowOrder::paired);
    experts(w.down, RowOrder::stacked);
}

void list_mlp(std::vector<WeightUse>& uses, int layer, MlpWeights& w) {
    uses.push_back({.group = "MLP", .layer = layer, .matrix = &w.gate_up, .order = RowOrder::paired});
    uses.push_back({.group = "MLP", .layer = layer, .matrix = &w.down});
}

/// The MTP layer, under one name.
void list_mtp(std::vector<WeightUse>& uses, const Qwen36MoeConfig& config, MtpWeights& w) {
    const size_t first = uses.size();
    const int layer = static_cast<int>(config.layers);
    uses.push_back({.group = "MTP", .layer = layer, .matrix = &w.fc});
    LayerWeights& l = w.layers.front();
    list_attention(uses, layer, l.attention);
    if (config.dense())
        list_mlp(uses, layer, l.mlp);
    else
        list_moe(uses, layer, l.moe, config.experts_used);
    for (size_t i = first; i < uses.size(); ++i) {
        uses[i].mtp_product = std::string_view(uses[i].group) != "router";
        uses[i].group = "MTP";
        uses[i].projection = false;
        uses[i].draft = true;
    }
}

void list_vectors(std::vector<WeightUse>& uses, const Qwen36MoeConfig& config, Qwen36MoeWeights& w) {
    const auto add = [&](Tensor& t) {
        if (t.data != nullptr) uses.push_back({.group = "norms", .vector = &t});
    };
    const auto add_layer = [&](LayerWeights& l) {
        for (Tensor* t : {&l.input_norm, &l.post_norm, &l.attention.q_norm, &l.attention.k_norm,
                          &l.delta.conv, &l.delta.decay_rate, &l.delta.dt_bias, &l.delta.norm})
            add(*t);
    };
    const LayerRange own = config.own_layers();
    for (int i = own.begin; i < own.end; ++i) add_layer(w.layers[static_cast<size_t>(i)]);
    // The norm that the last layer's rows leave with.
    add(config.is_last() ? w.final_norm : w.layers[static_cast<size_t>(own.end)].input_norm);
    if (!w.mtp) return;
    add(w.mtp->embedding_norm);
    add(w.mtp->hidden_norm);
    add_layer(w.mtp->layers.front());
    add(w.mtp->norm);
}

/// ModelWeights::uses. `w` must stay where it is. `drafts`: whether an MTP layer or drafter is here, which reads the embedding.
std::vector<WeightUse> list_weights(const Qwen36MoeConfig& config, Qwen36MoeWeights& w, bool drafts) {
    std::vector<WeightUse> uses;
    const bool embeds = config.is_first() || drafts;
    const LayerRange own = config.own_layers();
    for (int layer = own.begin; layer < own.end; ++layer) {
        const auto i = static_cast<size_t>(layer);
        if (config.full_attention[i])
            list_attention(uses, layer, w.layers[i].attention);
        else
            list_delta(uses, layer, w.layers[i].delta);
        if (config.dense())
            list_mlp(uses, layer, w.layers[i].mlp);
        else
            list_moe(uses, layer, w.layers[i].moe, config.experts_used);
    }
    if (w.mtp) list_mtp(uses, config, *w.mtp);
    if (embeds)
        uses.push_back(
            {.group = "embedding", .matrix = &w.embedding, .picked = 1, .draft = !config.is_first()});
    if (config.is_last())
        uses.push_back({.group = "head",
                        .matrix = &w.head,
                        .projection = true,
                        .tied = w.tied_head && embeds ? &w.embedding : nullptr});
    list_vectors(uses, config, w);
    if (w.vision && config.shard.rank == 0 && config.is_first())
        list_vision(uses, *w.vision);  // other ranks get what it makes
    return uses;
}

class Qwen36Moe final : public Model {
  public:
    Qwen36Moe(const ModelFamily& family, Checkpoint checkpoint, const OpenOptions& options)
        : family_(family),
          checkpoint_(std::move(checkpoint)),
          chat_(family.chat(checkpoint_->files().directory)),
          config_(parse_qwen3_6_moe_config(checkpoint_->config(), checkpoint_->files().config)) {
        const std::string& directory = checkpoint_->files().directory;
        std::future<void> text_side;  // takes longer than all the rest; its errors come last
        if (options.tokenizer) text_side = std::async([&] { load_text_side(directory, options); });
        bind_weights(options);
        add_drafter(options);
        if (text_side.valid()) text_side.get();
        generation_ = read_generation_defaults(*checkpoint_, config_.eos_ids, config_.vocab_rows);
        add_chat_end();
        add_draft_head(options);
        list_.plan_dense(options.dense);
        list_.plan_vision(options.vision_format);
        summarize(last_part(directory), options.dense);
        list_.plan_drafters(options.draft_format);
        keep_shard(options);
        if (info_.vision) info_.vision->format = options.vision_format;
        notes_.insert(notes_.end(), checkpoint_->notes().begin(), checkpoint_->notes().end());
        notes_.insert(notes_.end(), audit_.notes.begin(), audit_.notes.end());
    }

    /// Random weights: no checkpoint. Sampled as the real ones are (generation_config.json of Qwen3.6):
    /// drawing from all ids would measure something else.
    Qwen36Moe(const ModelFamily& family, const Qwen36MoeConfig& config, const std::string& name,
              const std::string& mix, const OpenOptions& options)
        : family_(family), chat_(family.chat(options.text_from)), config_(config) {
        if (options.vision) vision_ = synthetic_vision(name);
        weights_ = synthetic_weights(config_, mix, options.mtp != MtpUse::none, vision_, floats_);
        list_.uses = list_weights(config_, weights_, drafts());
        add_drafter(options);
        generation_ = {
            .temperature = 1.0f, .top_p = 0.95f, .top_k = 20, .origin = "built in: synthetic weights"};
        if (options.tokenizer && !options.text_from.empty()) load_text_side(options.text_from, options);
        add_chat_end();
        add_draft_head(options);
        list_.plan_dense(options.dense);
        list_.plan_vision(options.vision_format);
        list_.changes.clear();  // nothing is stored: they are made in the new format
        summarize(fmt::format("synthetic {} ({})", name, mix), options.dense);
        list_.plan_drafters(options.draft_format);
        keep_shard(options);
        if (info_.vision) info_.vision->format = options.vision_format;
    }

    LayerRange own_layers() const override { return config_.own_layers(); }
    void keep_layers(const LayerRange& range) override {
        if (!config_.shard.whole())
            FAIL(usage, "--split-mode layer does not run with -tp yet; leave one of them out");
        config_.part = range;
        if (!config_.is_last()) {
            weights_.mtp.reset();
            weights_.draft_head.reset();
        }
        list_.uses = list_weights(config_, weights_, drafts());
        list_drafting();
        list_.drop_unused();
    }
    const ModelInfo& info() const override { return info_; }
    const GenerationDefaults& generation() const override { return generation_; }
    const Tokenizer* tokenizer() const override { return tokenizer_; }
    const ChatFormat& chat() const override { return *chat_.format; }
    const Audit& audit() const override { return audit_; }
    const std::vector<std::string>& notes() const override { return notes_; }
    uint64_t digest() const override {
        constexpr uint64_t kBeginning = 4096;  // a page of the mapping
        ContentHash hash;
        if (drafter_) drafter_->add_to(hash);
        if (!checkpoint_) {  // the name says all of it
            hash.add(info_.name);
            hash.add(static_cast<int64_t>(info_.dense));
            return hash.value();
        }
        if (info_.dense != DenseFormat::as_stored) hash.add(static_cast<int64_t>(info_.dense));
        if (info_.vision && info_.vision->format != DenseFormat::as_stored)
            hash.add("vision"), hash.add(static_cast<int64_t>(info_.vision->format));
        hash.add(checkpoint_->config_text());
        for (const CheckpointTensor& t : checkpoint_->tensors()) {
            hash.add(t.name);
            hash.add(describe(*t.tensor));
            hash.add(t.tensor->data, std::min(t.tensor->bytes(), kBeginning));
        }
        return hash.value();
    }
    const ModelWeights& weights() const override { return list_; }
    ModelWeights& weights() override { return list_; }
    void check_weights(std::span<const Weight* const> list, int threads) const override {
        std::vector<const Weight*> own, drafters;
        for (const Weight* w : list) (drafter_ && drafter_->has(*w) ? drafters : own).push_back(w);
        if (checkpoint_) require_scales(*checkpoint_, own, threads);
        if (drafter_ && drafter_->checkpoint()) require_scales(*drafter_->checkpoint(), drafters, threads);
    }
    std::vector<StateSpec> state_specs(const StateOptions& options) const override {
        std::vector<StateSpec> specs = qwen3_6_moe_state(config_, whole_, options);
        if (!options.dflash || !config_.is_last()) return specs;
        CHECK(drafter_ != nullptr, "[dflash] this model was opened without a drafter");
        const int layer = static_cast<int>(config_.layers) + 1;
        for (StateSpec& spec : dflash_state(drafter_->config(), layer, options.conv))
            specs.push_back(std::move(spec));
        return specs;
    }
    BuiltGraph build(const BatchShape& shape, const StateViews& state, DType activations) const override {
        return build_qwen3_6_moe(config_, whole_, weights_, drafter_.get(), shape, state, activations);
    }

    VisionGraph build_vision(const VisionShape& shape, DType activations) const override {
        CHECK(vision_.has_value(), "[vision] this model was opened without its vision tower");
        return build_qwen3_6_vision(*vision_, *weights_.vision, shape, activations);
    }

  private:
    /// Finds every weight in the checkpoint and accounts for all of it.
    void bind_weights(const OpenOptions& options) {
        const int threads = options.threads;
        TensorUse use(*checkpoint_);
        Audit claims;  // of the configuration
        for_each_parallel(threads, 2, [&](size_t i) {
            if (i == 0)
                weights_ = read_qwen3_6_moe_weights(*checkpoint_, config_, use, threads);
            else
                check_config(*checkpoint_, config_, claims);
        });
        if (options.mtp != MtpUse::none) bind_mtp(options, use);
        if (options.vision && has_vision(*checkpoint_)) {
            vision_ = parse_qwen3_6_vision_config(*checkpoint_, config_.width, config_.vocab_rows);
            weights_.vision = read_qwen3_6_vision(*checkpoint_, *vision_, use);
        }
        audit_ = use.audit();
        audit_.problems.insert(audit_.problems.end(), claims.problems.begin(), claims.problems.end());
        audit_.notes.insert(audit_.notes.end(), claims.notes.begin(), claims.notes.end());
        audit_.require_ok();
        floats_ = use.take_floats();
        list_.uses = list_weights(config_, weights_, drafts());
    }

    /// Info is of the whole model; what is placed and built, of the shard. Rank 0 drafts for all.
    void keep_shard(const OpenOptions& options) {
        whole_ = config_;
        if (options.shard.whole()) return;
        if (info_.draft_tokens) info_.draft_tokens->whole_too = false;
        list_.begin_parts();
        const bool tied = weights_.tied_head;
        if (options.shard.rank > 0) drafter_.reset();
        if (options.shard.rank == 0 && drafts() && !weights_.draft_head)
            list_.change_copy(weights_.whole_head.emplace(weights_.head), weights_.head);
        config_ = shard_qwen3_6_moe(whole_, options.shard);
        shard_qwen3_6_moe(weights_, whole_, options.shard, floats_);
        list_.uses = list_weights(config_, weights_, drafts());
        list_drafting();
        if (weights_.whole_head)
            list_.uses.push_back({.group = "draft head",
                                  .matrix = &*weights_.whole_head,
                                  .draft = true,
                                  .tied = tied ? &weights_.embedding : nullptr});
        list_.plan_parts();
    }

    /// Whether an MTP layer or drafter is here. A drafter's taps are of all devices, its weights of the last.
    bool drafts() const { return weights_.mtp || (drafter_ && config_.is_last()); }

    /// What drafting reads, but for the MTP layer, the embedding and a whole head.
    void list_drafting() {
        if (drafter_ && config_.is_last()) drafter_->list(list_.uses, static_cast<int>(config_.layers));
        if (weights_.draft_head) list_draft_head();
    }

    void list_draft_head() {
        list_.uses.push_back(
            {.group = "draft head", .matrix = &weights_.draft_head->weight, .draft = true, .copy = true});
    }

    static void require_scales(const Checkpoint& checkpoint, std::span<const Weight* const> list,
                               int threads) {
        std::vector<const WeightSegment*> segments;
        for (const Weight* w : list)
            for (const WeightSegment& s : w->segments) segments.push_back(&s);
        const ScaleCheck result = check_scales(checkpoint, segments, threads);
        if (result.problems.empty()) return;
        std::string text = result.problems[0];
        if (result.problems.size() > 1)
            text += fmt::format(" (and {} more like it)", result.problems.size() - 1);
        FAIL(model, "{}", text);
    }

    void add_drafter(const OpenOptions& options) {
        if (options.draft_model.empty()) return;
        const DflashTarget target{config_.width, config_.layers, config_.vocab_rows};
        drafter_ = checkpoint_ ? Dflash::open(options.draft_model, target, options.threads)
                               : Dflash::synthetic(options.draft_model, target);
        drafter_->list(list_.uses, static_cast<int>(config_.layers));
    }

    void bind_mtp(const OpenOptions& options, TensorUse& use) {
        try {
            weights_.mtp = read_qwen3_6_mtp(*checkpoint_, config_, use, options.threads);
        } catch (const Error& error) {
            if (options.mtp == MtpUse::required || error.kind() != ErrorKind::model) throw;
            notes_.push_back(fmt::format("no drafts by MTP: {}", error.what()));
        }
    }

    void load_text_side(const std::string& directory, const OpenOptions& options) {
        tokenizer_ = options.shared_tokenizer;
        if (tokenizer_ == nullptr)
            tokenizer_ =
                &own_tokenizer_.emplace(Tokenizer::load(directory, config_.vocab_rows, options.threads));
        if (!chat_.note.empty()) notes_.push_back(chat_.note);
    }

    /// A chat turn ends with these, whatever the configurations name: config.json alone names the document's
    /// end.
    void add_chat_end() {
        if (tokenizer_ == nullptr) return;
        std::vector<int32_t>& ids = generation_.eos_ids;
        for (const char* marker : {chat().turn_end, chat().text_end}) {
            const auto id = tokenizer_->find_added(marker);
            if (id && std::find(ids.begin(), ids.end(), *id) == ids.end()) ids.push_back(*id);
        }
    }

    void add_draft_head(const OpenOptions& options) {
        if (!weights_.mtp && !drafter_) return;
        const Tokenizer* t = tokenizer();
        const int64_t vocab = t != nullptr ? std::min(t->size(), config_.vocab_rows) : config_.vocab_rows;
        weights_.draft_head =
            plan_draft_head(weights_.head, options.draft_head_bytes, vocab, t, options.draft_frequent);
        if (!weights_.draft_head) return;
        DraftHead& head = *weights_.draft_head;
        info_.draft_tokens = head.tokens;
        list_draft_head();
        list_.copies.push_back({.weight = &head.weight,
                                .from = head.from,
                                .first_rows = head.frequent ? &head.frequent : nullptr});
    }

    static std::string last_part(std::string directory) {
        while (directory.size() > 1 && directory.back() == '/') directory.pop_back();
        return directory.substr(directory.find_last_of('/') + 1);
    }

    void summarize(const std::string& name, DenseFormat dense) {
        ModelInfo& i = info_;
        i.name = name;
        i.architecture = family_.architecture;
        i.dense = dense;
        i.layers = config_.layers;
        i.attention_layers = std::count(config_.full_attention.begin(), config_.full_attention.end(), true);
        i.width = config_.width;
        i.experts = config_.experts;
        i.experts_used = config_.experts_used;
        i.vocab_rows = config_.vocab_rows;
        i.vocab = tokenizer_ ? std::min(tokenizer_->size(), config_.vocab_rows) : config_.vocab_rows;
        i.context = config_.context;
        i.mtp = weights_.mtp.has_value();
        if (vision_) i.vision = vision_->info();
        if (drafter_) {
            const DflashConfig& d = drafter_->config();
            i.dflash = {drafter_->name(), d.block, d.mask, !d.causal && d.has_windows(), d.taps};
        }
        count_weights();
    }

    void count_weights() {
        std::set<std::string> formats;
        const auto count_formats = [&](const Weight& w) {
            for (const WeightSegment& s : w.segments) formats.insert(dtype_name(s.dtype));
        };
        double token_bytes = 0;
        for (const WeightUse& use : list_.uses) {
            token_bytes += use.share(1) * static_cast<double>(use.bytes());
            if (use.again() || use.copy) continue;
            info_.parameters += use.parameters();
            info_.weight_bytes += use.bytes();
            if (use.matrix != nullptr) count_formats(*use.matrix);
            if (use.experts != nullptr)
                for (const Weight& w : use.experts->expert) count_formats(w);
        }
        info_.token_bytes = static_cast<int64_t>(token_bytes);
        for (const std::string& f : formats) info_.formats += (info_.formats.empty() ? "" : " + ") + f;
    }

    const ModelFamily& family_;
    std::optional<Checkpoint> checkpoint_;  // keeps the mapping that the weights point into; none: synthetic
    ChatChoice chat_;
    Qwen36MoeConfig config_;  // of this rank's part
    Qwen36MoeConfig whole_;
    std::optional<Qwen36VisionConfig> vision_;  // with weights_.vision
    Qwen36MoeWeights weights_;
    std::vector<std::unique_ptr<float[]>> floats_;
    std::unique_ptr<Dflash> drafter_;
    ModelWeights list_;  // points into weights_ and drafter_
    Audit audit_;
    std::optional<Tokenizer> own_tokenizer_;
    const Tokenizer* tokenizer_ = nullptr;
    GenerationDefaults generation_;
    ModelInfo info_;
    std::vector<std::string> notes_;
};

}  // namespace

std::unique_ptr<Model> open_qwen3_6_moe(const ModelFamily& family, Checkpoint checkpoint,
                                        const OpenOptions& options) {
    return std::make_unique<Qwen36Moe>(family, std::move(checkpoint), options);
}

std::unique_ptr<Model> open_synthetic(const std::string& name, const std::string& mix,
                                      const OpenOptions& options) {
    const Qwen36MoeConfig config = synthetic_config(name);
    return std::make_unique<Qwen36Moe>(find_family(config.architecture()), config, name, mix, options);
}

}  // namespace quern
