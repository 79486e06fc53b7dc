// Images on a model that several ranks or stages run: the first makes the features; all ranks read them, and the first stage.
#include <doctest/doctest.h>

#include "ggml-like/backend_group.h"
#include "lazy_backend.h"
#include "stage_models.h"

namespace quern {
namespace {

Image noise(unsigned seed) {
    std::mt19937 random(seed);
    Image image{.width = 96, .height = 64, .rgb = std::vector<uint8_t>(96 * 64 * 3)};
    for (uint8_t& byte : image.rgb) byte = static_cast<uint8_t>(random());
    return image;
}

/// The logits of a prompt with an image in its middle, then those of its answer.
std::vector<float> logits_of(const std::unique_ptr<Backend>& backend, unsigned image_seed,
                             DenseFormat tower = DenseFormat::as_stored) {
    OpenOptions options{.tokenizer = false, .vision = true};
    options.vision_format = tower;
    const auto model = load_model(test::source_dir() + "/models/demo", *backend, options);
    CHECK(changes_later(*model) == (tower != DenseFormat::as_stored));
    requantize_weights(*model, *backend);
    Engine engine(*model, *backend, {.context = 512, .step_tokens = 64});
    const auto image =
        std::make_shared<const ImagePart>(model->read_image(noise(image_seed), engine.image_sizes()));
    Request r{.prompt = test::random_ids(*model, 50, 1), .images = {image}};
    r.prompt.insert(r.prompt.end(), image->keys.begin(), image->keys.end());
    const auto rest = test::random_ids(*model, 30, 2);
    r.prompt.insert(r.prompt.end(), rest.begin(), rest.end());
    r.sampling.temperature = 0;
    r.max_tokens = 6;
    std::vector<float> logits;
    r.on_prompt_logits = [&](const PromptLogits& rows) {
        logits.insert(logits.end(), rows.values.begin(), rows.values.end());
    };
    r.on_logits = [&](int32_t, std::span<const float> row) {
        logits.insert(logits.end(), row.begin(), row.end());
    };
    const Result result = engine.run(std::move(r));
    CHECK(result.error == "");
    CHECK(result.tokens.size() == 6);
    return logits;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double squares = 0, all = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        squares += std::pow(static_cast<double>(a[i]) - b[i], 2);
        all += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(squares / all);
}

TEST_SUITE("cpu") {
    TEST_CASE("ranks: images are seen by all of them") {
        const std::vector<float> one = logits_of(test::cpu(), 5);
        for (const int ranks : {2, 4}) {
            CAPTURE(ranks);
            CHECK(difference(logits_of(make_cpu_backends(2, ranks), 5), one) < 5e-6);
            CHECK(difference(logits_of(make_cpu_backends(2, ranks), 6), one) > 1e-3);
        }
    }

    TEST_CASE("stages: images have the bits of one device") {
        const std::vector<float> one = logits_of(test::cpu(), 5);
        for (const int stages : {2, 3}) {
            CAPTURE(stages);
            CHECK(logits_of(make_cpu_stages(2, stages), 5) == one);
        }
        CHECK(logits_of(test::DeviceStages(2).group, 5) == logits_of(test::device(), 5));
    }

    TEST_CASE("stages: an image is encoded when nothing is on its way, whoever else runs") {
        const auto answers = [](Backend& backend) {
            const auto model = load_model(test::source_dir() + "/models/demo", backend,
                                          {.tokenizer = false, .vision = true});
            Engine engine(*model, backend, {.context = 512, .sequences = 2, .step_tokens = 64});
            const auto image =
                std::make_shared<const ImagePart>(model->read_image(noise(5), engine.image_sizes()));
            std::vector<test::Outcome> out(2);
            std::vector<RequestId> ids;
            for (const unsigned i : {0u, 1u}) {
                Request r = test::recorded(test::random_ids(*model, 200 + 150 * i, i), out[i], false);
                r.images = {image};
                r.prompt.insert(r.prompt.end(), image->keys.begin(), image->keys.end());
                ids.push_back(engine.submit(std::move(r)));
            }
            while (engine.step()) {
            }
            for (size_t i = 0; i < out.size(); ++i) test::take(engine, ids[i], out[i]);
            return out;
        };
        const auto expected = answers(*test::device());
        CHECK(expected[0].tokens.size() == 12);
        for (const int stages : {2, 3}) {
            CAPTURE(stages);
            CHECK(answers(*test::LazyStages(stages).group) == expected);
        }
    }

    TEST_CASE("stages: an image waits for no answer to end") {
        const test::LazyStages lazy(3);
        const auto model = load_model(test::source_dir() + "/models/demo", *lazy.group,
                                      {.tokenizer = false, .vision = true});
        Engine engine(*model, *lazy.group, {.context = 512, .sequences = 5, .step_tokens = 64});
        std::vector<test::Outcome> texts(4);
        int64_t told = 0;
        for (const unsigned i : {0u, 1u, 2u, 3u}) {
            Request text = test::recorded(test::random_ids(*model, 20, i), texts[i], false, 200);
            if (i == 0) text.on_token = [&](int32_t) { return ++told > 0; };
            engine.submit(std::move(text));
        }
        while (told < 3) engine.step();
        test::Outcome out;
        Request r = test::recorded(test::random_ids(*model, 20, 7), out, false, 1);
        r.images = {std::make_shared<const ImagePart>(model->read_image(noise(5), engine.image_sizes()))};
        r.prompt.insert(r.prompt.end(), r.images[0]->keys.begin(), r.images[0]->keys.end());
        const RequestId id = engine.submit(std::move(r));
        while (!engine.finished(id) && told < 100) engine.step();
        CHECK(engine.finished(id));
        CHECK(told < 20);
    }

    TEST_CASE("stages and ranks: a tower in FP8 makes the features that it makes on one device") {
        const std::vector<float> one = logits_of(test::cpu(), 5, DenseFormat::fp8);
        CHECK(difference(one, logits_of(test::cpu(), 5)) > 1e-4);
        for (const int stages : {2, 3})
            CHECK(logits_of(make_cpu_stages(2, stages), 5, DenseFormat::fp8) == one);
        CHECK(difference(logits_of(make_cpu_backends(2, 2), 5, DenseFormat::fp8), one) < 5e-6);
    }
}

}  // namespace
}  // namespace quern
