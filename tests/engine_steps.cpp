// The shapes of the steps that an engine builds plans for: the kind of each, and how many rows.
#include <doctest/doctest.h>

#include <random>

#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/ops/logits_top.h"
#include "vision_models.h"

namespace quern {
namespace {

/// A model that notes what it is built for.
class Noted final : public Model {
  public:
    explicit Noted(Model& model) : model_(model) {}
    const ModelInfo& info() const override { return model_.info(); }
    const GenerationDefaults& generation() const override { return model_.generation(); }
    const Tokenizer* tokenizer() const override { return model_.tokenizer(); }
    const ChatFormat& chat() const override { return model_.chat(); }
    const Audit& audit() const override { return model_.audit(); }
    const std::vector<std::string>& notes() const override { return model_.notes(); }
    uint64_t digest() const override { return model_.digest(); }
    const ModelWeights& weights() const override { return std::as_const(model_).weights(); }
    ModelWeights& weights() override { return model_.weights(); }
    void check_weights(std::span<const Weight* const> list, int threads) const override {
        model_.check_weights(list, threads);
    }
    std::vector<StateSpec> state_specs(const StateOptions& options) const override {
        return model_.state_specs(options);
    }
    BuiltGraph build(const BatchShape& shape, const StateViews& state, DType activations) const override {
        shapes.push_back({shape.kind == StepKind::answer ? "answer" : "prompt", shape.tokens, shape.sequences,
                          shape.logit_rows});
        return model_.build(shape, state, activations);
    }
    VisionGraph build_vision(const VisionShape& shape, DType activations) const override {
        ++tower_steps;
        return model_.build_vision(shape, activations);
    }

    using Shape = std::tuple<std::string, int64_t, int64_t, int64_t>;
    mutable std::vector<Shape> shapes;
    mutable int tower_steps = 0;

  private:
    Model& model_;
};

using Shapes = std::vector<Noted::Shape>;

Request greedy(size_t prompt, int64_t tokens) {
    Request r;
    for (size_t i = 0; i < prompt; ++i) r.prompt.push_back(static_cast<int32_t>(i * 7 % 90));
    r.sampling.temperature = 0;
    r.max_tokens = tokens;
    return r;
}

/// After its first token three more are given.
Request with_forced(size_t prompt, int64_t tokens) {
    Request r = greedy(prompt, tokens);
    r.force = [first = true]() mutable {
        return std::exchange(first, false) ? std::vector<int32_t>{1, 2, 3} : std::vector<int32_t>();
    };
    return r;
}

std::unique_ptr<test::Loaded> load(std::unique_ptr<Backend> backend) {
    return std::make_unique<test::Loaded>(test::source_dir() + "/tests/vectors/parity/base/ct",
                                          std::move(backend));
}

/// With three images of 100 patches, of which two fit a step of the tower.
Request question(const Model& model, unsigned seed) {
    std::mt19937 random(seed);
    Request r = greedy(3, 4);
    for (int i = 0; i < 3; ++i) {
        Image pixels{80, 80, std::vector<uint8_t>(3 * 80 * 80)};
        for (uint8_t& v : pixels.rgb) v = static_cast<uint8_t>(random());
        r.images.push_back(
            std::make_shared<const ImagePart>(model.read_image(pixels, model.info().vision->sizes)));
        r.prompt.insert(r.prompt.end(), r.images.back()->keys.begin(), r.images.back()->keys.end());
    }
    r.prompt.push_back(5);
    return r;
}

TEST_SUITE("cpu") {
    TEST_CASE("engine: between two tokens of an answer is one step of prompts or of the tower at most") {
        const test::Seeing l("moe", std::make_unique<test::CountedBackend>(int64_t{1} << 34));
        Noted model(*l.model);
        Engine engine(model, *l.backend, {.context = 256, .sequences = 3, .step_tokens = 64});
        int64_t answered = 0, ended = 0, steps = 0, all = 0;
        Request text = greedy(5, 200);
        text.on_token = [&](int32_t) { return ++answered > 0; };
        engine.submit(std::move(text));
        while (answered < 3) engine.step();
        model.tower_steps = 0;
        bool read = false;
        for (const unsigned seed : {1, 2}) {
            Request r = question(*l.model, seed);
            r.on_prefill = [&](int64_t rows) { read |= rows > 0; };
            r.on_token = [&](int32_t) { return ++ended > 0; };
            engine.submit(std::move(r));
        }
        for (int64_t told = answered; ended < 8; told = answered, steps = 0) {
            while (answered == told) {
                engine.step();  // at its end clients get what there is
                steps += std::exchange(model.tower_steps, 0) + std::exchange(read, false);
            }
            CHECK(steps <= 1);
            all += steps;
        }
        CHECK(all >= 4 + 3);
    }

    TEST_CASE("engine: a single row of a prompt is a prompt step, forced tokens are one answer step") {
        const auto l = load(make_cpu_backend(1));
        Noted model(*l->model);
        Engine engine(model, *l->backend, {.context = 256, .step_tokens = 64});
        model.shapes.clear();
        engine.run(with_forced(65, 8));
        CHECK(model.shapes ==
              Shapes{{"prompt", 64, 1, 0}, {"prompt", 1, 1, 1}, {"answer", 4, 1, 1}, {"answer", 1, 1, 1}});
        model.shapes.clear();
        Request all = greedy(100, 1);
        all.on_prompt_logits = [](const PromptLogits&) {};
        engine.run(std::move(all));
        CHECK(model.shapes == Shapes{{"prompt", 64, 1, 64}, {"prompt", 36, 1, 36}});
    }

    TEST_CASE("engine: only answers that read no other logit ask for the highest alone") {
        const auto l = load(make_cpu_backend(1));
        Engine engine(*l->model, *l->backend, {.context = 256, .sequences = 6});
        std::vector<float> asked;
        l->backend->after_node = [&](const Node& node, double, const std::string&) {
            if (node.op != &kLogitsTop) return;
            const auto* temperature = node.inputs[1]->as<float>();
            asked.assign(temperature, temperature + node.inputs[1]->elements());
        };
        std::vector<Request> list;
        const auto& add = [&](float temperature) -> Request& {
            list.push_back(greedy(5, 2));
            list.back().sampling.temperature = temperature;
            return list.back();
        };
        add(0);
        add(0.7f);
        add(0.7f).sampling.top_k = 1;
        add(0).sampling.repetition_penalty = 1.5f;
        add(0).allow = [](int32_t) { return true; };
        add(0).on_logits = [](int32_t, std::span<const float>) {};
        for (Request& r : list) engine.submit(std::move(r));
        while (engine.step()) {
        }
        CHECK(asked == std::vector<float>{-1, 0.7f, -1, 0, 0, 0});
    }

    TEST_CASE("engine: on a device answers of one row run the plans that were captured at the start") {
        const auto l = load(std::make_unique<test::CountedBackend>(int64_t{1} << 34));
        Noted model(*l->model);
        Engine engine(model, *l->backend, {.context = 256, .sequences = 3});
        for (int64_t n = 1; n <= 3; ++n)
            CHECK(std::count(model.shapes.begin(), model.shapes.end(), Noted::Shape{"answer", n, n, n}) >= 1);
        model.shapes.clear();
        const RequestId first = engine.submit(greedy(20, 30)), second = engine.submit(with_forced(30, 20));
        engine.step();
        const RequestId third = engine.submit(greedy(40, 9));
        while (engine.step()) {
        }
        // What must follow the second one's first token is known when the next step runs already.
        CHECK(model.shapes == Shapes{{"prompt", 50, 2, 2}, {"prompt", 40, 1, 1}, {"answer", 5, 3, 3}});
        for (const RequestId id : {first, second, third}) CHECK(engine.take(id).error.empty());
    }
}

}  // namespace
}  // namespace quern
