#include "models/model_group.h"

#include <utility>

#include "ggml-like/parallel.h"

namespace quern {
namespace {

class ModelGroup final : public Model {
  public:
    explicit ModelGroup(std::vector<std::unique_ptr<Model>> ranks) : ranks_(std::move(ranks)) {}

    Model& of_rank(int rank) override { return *ranks_[static_cast<size_t>(rank)]; }
    const Model& of_rank(int rank) const override { return *ranks_[static_cast<size_t>(rank)]; }

    const ModelInfo& info() const override { return first().info(); }
    const GenerationDefaults& generation() const override { return first().generation(); }
    const Tokenizer* tokenizer() const override { return first().tokenizer(); }
    const ChatFormat& chat() const override { return first().chat(); }
    const Audit& audit() const override { return first().audit(); }
    const std::vector<std::string>& notes() const override { return first().notes(); }
    uint64_t digest() const override { return first().digest(); }
    const ModelWeights& weights() const override { return first().weights(); }
    ModelWeights& weights() override { return of_rank(0).weights(); }
    void check_weights(std::span<const Weight* const> list, int threads) const override {
        first().check_weights(list, threads);
    }
    std::vector<StateSpec> state_specs(const StateOptions& options) const override {
        return first().state_specs(options);
    }
    BuiltGraph build(const BatchShape& shape, const StateViews& state, DType activations) const override {
        return first().build(shape, state, activations);
    }
    VisionGraph build_vision(const VisionShape& shape, DType activations) const override {
        return first().build_vision(shape, activations);
    }

  private:
    const Model& first() const { return *ranks_.front(); }

    std::vector<std::unique_ptr<Model>> ranks_;
};

}  // namespace

std::unique_ptr<Model> open_ranks(int ranks, const OpenOptions& options,
                                  const std::function<std::unique_ptr<Model>(const OpenOptions&)>& open) {
    if (ranks == 1) return open(options);
    std::vector<std::unique_ptr<Model>> models(static_cast<size_t>(ranks));
    for_each_parallel(ranks, models.size(), [&](size_t rank) {
        OpenOptions own = options;
        own.shard = {.rank = static_cast<int>(rank), .of = ranks};
        own.tokenizer = options.tokenizer && rank == 0;
        models[rank] = open(own);
    });
    return std::make_unique<ModelGroup>(std::move(models));
}

}  // namespace quern
