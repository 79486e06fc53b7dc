#include "models/stage_models.h"

#include <string_view>
#include <utility>

#include "ggml-like/check.h"
#include "ggml-like/parallel.h"

namespace quern {
namespace {

class StageModels final : public Model {
  public:
    explicit StageModels(std::vector<std::unique_ptr<Model>> stages) : stages_(std::move(stages)) {
        for (const auto& stage : stages_) {
            const std::vector<WeightUse>& uses = stage->weights().uses;
            all_.uses.insert(all_.uses.end(), uses.begin(), uses.end());
        }
    }

    int stages() const override { return static_cast<int>(stages_.size()); }
    Model& of_stage(int stage) override { return *stages_[static_cast<size_t>(stage)]; }
    const Model& of_stage(int stage) const override { return *stages_[static_cast<size_t>(stage)]; }

    const ModelInfo& info() const override { return first().info(); }
    const GenerationDefaults& generation() const override { return first().generation(); }
    const Tokenizer* tokenizer() const override { return first().tokenizer(); }
    const ChatFormat& chat() const override { return first().chat(); }
    const Audit& audit() const override { return first().audit(); }
    const std::vector<std::string>& notes() const override { return first().notes(); }
    uint64_t digest() const override { return first().digest(); }
    /// Of all stages.
    const ModelWeights& weights() const override { return all_; }
    ModelWeights& weights() override { return all_; }
    void check_weights(std::span<const Weight* const> list, int threads) const override {
        first().check_weights(list, threads);
    }
    std::vector<StateSpec> state_specs(const StateOptions& options) const override {
        std::vector<StateSpec> specs;
        for (int s = 0; s < stages(); ++s)
            for (StateSpec& spec : of_stage(s).state_specs(options)) {
                spec.stage = s;
                specs.push_back(std::move(spec));
            }
        return specs;
    }
    BuiltGraph build(const BatchShape&, const StateViews&, DType) const override {
        FAIL(runtime, "[stages] a graph is one stage's");
    }
    VisionGraph build_vision(const VisionShape& shape, DType activations) const override {
        return first().build_vision(shape, activations);
    }

  private:
    const Model& first() const { return *stages_.front(); }

    std::vector<std::unique_ptr<Model>> stages_;
    ModelWeights all_;  // points into the stages
};

LayerSizes sizes_of(const Model& model, bool by_bytes) {
    LayerSizes sizes;
    sizes.layer.assign(static_cast<size_t>(model.info().layers), by_bytes ? 0.0 : 1.0);
    if (!by_bytes) return sizes;
    bool drafts = false, shared = false;  // drafting reads the embedding, too; the head may be its memory
    double embedding_bytes = 0;
    for (const WeightUse& use : model.weights().uses) {
        if (use.vector != nullptr) continue;
        const auto bytes = static_cast<double>(use.bytes());
        const bool embedding = use.group == std::string_view("embedding");
        if (use.layer >= 0 && use.layer < model.info().layers)
            sizes.layer[static_cast<size_t>(use.layer)] += bytes;
        else
            (embedding || use.vision ? sizes.before : sizes.after) += bytes;
        drafts |= use.draft;
        if (embedding) embedding_bytes = bytes;
        shared |= use.again();
    }
    if (drafts && !shared) sizes.after += embedding_bytes;
    return sizes;
}

}  // namespace

std::unique_ptr<Model> open_stages(const StageShares& shares, const OpenOptions& options,
                                   const std::function<std::unique_ptr<Model>(const OpenOptions&)>& open) {
    const size_t count = shares.of_device.size();
    if (count == 1) return open(options);
    std::vector<std::unique_ptr<Model>> models(count);
    const auto open_one = [&](size_t stage, const Tokenizer* tokenizer) {
        OpenOptions own = options;
        own.tokenizer = options.tokenizer && (stage == 0 || tokenizer != nullptr);
        if (stage > 0 && tokenizer != nullptr) own.shared_tokenizer = tokenizer;
        models[stage] = open(own);
    };
    // The last one chooses rows of a head for drafting by the first one's tokenizer.
    const bool drafts = options.mtp != MtpUse::none || !options.draft_model.empty();
    const size_t alone = drafts ? 1 : 0;
    if (drafts) open_one(0, nullptr);
    const Tokenizer* tokenizer = drafts ? models[0]->tokenizer() : nullptr;
    for_each_parallel(static_cast<int>(count - alone), count - alone,
                      [&](size_t i) { open_one(alone + i, tokenizer); });
    const std::vector<LayerRange> ranges =
        split_layers(sizes_of(*models[0], shares.by_bytes), shares.of_device);
    for (size_t stage = 0; stage < count; ++stage) models[stage]->keep_layers(ranges[stage]);
    return std::make_unique<StageModels>(std::move(models));
}

}  // namespace quern
