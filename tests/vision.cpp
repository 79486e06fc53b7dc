// Images in prompts: tiny random models with vision towers against transformers (scripts/make_vision_vectors.py), and the same
// answers alone, in a crowd, in small steps and from kept states.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "ggml-like/error.h"
#include "ops/second_backend.h"
#include "tools/common/images/decode.h"
#include "tools/engine/prompt_images.h"
#include "vision_models.h"

namespace quern {
namespace {

namespace fs = std::filesystem;
using test::features, test::kVisionModels, test::relative, test::values, test::vision_folder;
using Loaded = test::Seeing;

struct Golden {
    std::string name;
    std::vector<Image> images;
    std::vector<uint8_t> patches;
    std::vector<float> features, logits, bf16;
    std::vector<int32_t> expanded, positions, greedy;
};

std::vector<Golden> goldens(const std::string& model) {
    std::vector<Golden> list;
    for (const auto& entry : fs::directory_iterator(vision_folder(model))) {
        if (!entry.path().string().ends_with(".golden.safetensors")) continue;
        const SafetensorsFile file = SafetensorsFile::open(entry.path().string());
        Golden g{.name = model + "/" + entry.path().filename().string()};
        for (int i = 0; file.find("image." + std::to_string(i)) != nullptr; ++i)
            g.images.push_back(decode_image(values<uint8_t>(file, "image." + std::to_string(i))));
        g.patches = values<uint8_t>(file, "patches");
        g.features = values<float>(file, "features");
        g.logits = values<float>(file, "logits");
        g.bf16 = values<float>(file, "bf16");
        g.expanded = values<int32_t>(file, "expanded");
        g.positions = values<int32_t>(file, "positions");
        g.greedy = values<int32_t>(file, "greedy");
        list.push_back(std::move(g));
    }
    REQUIRE(list.size() == 4);
    std::sort(list.begin(), list.end(), [](const Golden& a, const Golden& b) { return a.name < b.name; });
    return list;
}

/// A greedy request for as many tokens as transformers answered.
Request request(const Loaded& l, const Golden& g) {
    Request r{.images = l.read(g.images)};
    r.prompt = l.with_keys(g.expanded, r.images, l.model->info().vision->token);
    r.sampling.temperature = 0;
    r.max_tokens = static_cast<int64_t>(g.greedy.size());
    return r;
}

/// The median of the rows' relative errors: rounding may send a row of a mixture to another expert, which says nothing of others.
double median_row(std::span<const float> got, std::span<const float> expected, size_t width) {
    std::vector<double> errors;
    for (size_t at = 0; at + width <= got.size(); at += width)
        errors.push_back(relative(got.subspan(at, width), expected.subspan(at, width)));
    std::nth_element(errors.begin(), errors.begin() + static_cast<int64_t>(errors.size() / 2), errors.end());
    return errors[errors.size() / 2];
}

/// In F32: features within 1e-5, logits within 1e-4, relative, and the same tokens. Else features, and logits by the median row, no
/// further off than 1.5 times transformers' own BF16.
void compare(std::unique_ptr<Backend> (*backend)(), bool exact) {
    for (const char* name : kVisionModels) {
        const Loaded l(name, backend());
        Engine engine(*l.model, *l.backend, {.context = 512, .step_tokens = 512});
        for (const Golden& g : goldens(name)) {
            CAPTURE(g.name);
            const std::vector<ImagePtr> images = l.read(g.images);
            std::vector<uint8_t> patches;
            for (const ImagePtr& image : images)
                patches.insert(patches.end(), image->patches.begin(), image->patches.end());
            CHECK(patches == g.patches);
            const double tower = relative(features(l, images), g.features);
            CHECK(tower < (exact ? 1e-5 : 1.5 * double{g.bf16.at(0)}));
            Request r = request(l, g);
            std::vector<float> logits;
            r.on_prompt_logits = [&](const PromptLogits& rows) {
                logits.insert(logits.end(), rows.values.begin(), rows.values.end());
            };
            const Result result = engine.run(std::move(r));
            CHECK(result.error == "");
            const double error = exact ? relative(logits, g.logits)
                                       : median_row(logits, g.logits, logits.size() / g.expanded.size());
            CHECK(error < (exact ? 1e-4 : 1.5 * double{g.bf16.at(1)}));
            if (!exact) MESSAGE(g.name << ": features " << tower << ", logits " << error);
            if (exact) CHECK(result.tokens == g.greedy);
        }
    }
}

std::unique_ptr<Backend> on_cpu() { return make_cpu_backend(2); }

Result run(Engine& engine, Request r) {
    Result result = engine.run(std::move(r));
    CHECK(result.error == "");
    return result;
}

}  // namespace

TEST_SUITE("cuda") {
    TEST_CASE("vision: features and logits are near those of transformers (CUDA)") {
        compare(test::make_test_cuda_backend, false);
    }

    TEST_CASE("vision: an answer is the same in small steps, in a crowd and from kept states (CUDA)") {
        for (const char* name : kVisionModels) {
            const Loaded l(name, test::make_test_cuda_backend());
            const std::vector<Golden> all = goldens(name);
            Engine alone(*l.model, *l.backend, {.context = 512});
            std::vector<std::vector<int32_t>> expected;
            for (const Golden& g : all) expected.push_back(run(alone, request(l, g)).tokens);
            Engine small(*l.model, *l.backend, {.context = 512, .step_tokens = 64, .cache_bytes = 64 << 20});
            for (int times = 0; times < 2; ++times)
                for (size_t i = 0; i < all.size(); ++i)
                    CHECK(run(small, request(l, all[i])).tokens == expected[i]);
            Engine crowd(*l.model, *l.backend, {.context = 512, .sequences = 4, .step_tokens = 128});
            std::vector<RequestId> ids;
            for (const Golden& g : all) ids.push_back(crowd.submit(request(l, g)));
            while (crowd.step()) {
            }
            for (size_t i = 0; i < all.size(); ++i) CHECK(crowd.take(ids[i]).tokens == expected[i]);
        }
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("vision: pixels, features, logits and answers are those of transformers") {
        compare(on_cpu, true);
    }

    TEST_CASE("vision: positions are those of transformers") {
        for (const char* name : kVisionModels) {
            const Loaded l(name, on_cpu());
            for (const Golden& g : goldens(name)) {
                CAPTURE(g.name);
                const Request r = request(l, g);
                const PromptImages images(r.prompt, r.images);
                const size_t tokens = g.expanded.size();
                for (size_t t = 0; t < tokens; ++t) {
                    CAPTURE(t);
                    const auto p = images.place(static_cast<int64_t>(t));
                    CHECK(p == PromptImages::Place{g.positions[t], g.positions[tokens + t],
                                                   g.positions[2 * tokens + t]});
                }
                const int32_t next = *std::max_element(g.positions.begin(), g.positions.end()) + 1;
                CHECK(images.place(static_cast<int64_t>(tokens)) == PromptImages::Place{next, next, next});
            }
        }
    }

    TEST_CASE("vision: positions of 500 random layouts are those of transformers") {
        const SafetensorsFile file = SafetensorsFile::open(vision_folder("positions.safetensors"));
        const std::vector<int32_t> texts = values<int32_t>(file, "texts"),
                                   grids = values<int32_t>(file, "grids");
        const std::vector<int16_t> positions = values<int16_t>(file, "positions");
        REQUIRE(texts.size() == 500 * 5);
        const int16_t* expected = positions.data();
        size_t wrong = 0;
        for (size_t i = 0; i < 500; ++i) {
            std::vector<int32_t> prompt;
            std::vector<ImagePtr> images;
            for (size_t k = 0; k < 5; ++k) {
                prompt.insert(prompt.end(), static_cast<size_t>(texts[5 * i + k]), 1);
                const int32_t* grid = grids.data() + (4 * i + k) * 2;
                if (k == 4 || grid[0] == 0) continue;
                ImagePart part{.rows = grid[0], .columns = grid[1]};
                part.keys.assign(static_cast<size_t>(part.tokens()), -1 - static_cast<int32_t>(k));
                prompt.insert(prompt.end(), part.keys.begin(), part.keys.end());
                images.push_back(std::make_shared<const ImagePart>(std::move(part)));
            }
            const PromptImages all(prompt, images);
            for (size_t t = 0; t < prompt.size(); ++t, expected += 3)
                wrong += all.place(static_cast<int64_t>(t)) !=
                         PromptImages::Place{expected[0], expected[1], expected[2]};
        }
        CHECK(wrong == 0);
        CHECK(expected == positions.data() + positions.size());
    }

    TEST_CASE("vision: an answer is the same in small steps, in a crowd and from kept states") {
        for (const char* name : kVisionModels) {
            const Loaded l(name, on_cpu());
            const std::vector<Golden> all = goldens(name);
            Engine small(*l.model, *l.backend, {.context = 512, .step_tokens = 64});
            for (const Golden& g : all) CHECK(run(small, request(l, g)).tokens == g.greedy);

            Engine crowd(*l.model, *l.backend, {.context = 512, .sequences = 4, .step_tokens = 128});
            std::vector<RequestId> ids;
            for (const Golden& g : all) ids.push_back(crowd.submit(request(l, g)));
            while (crowd.step()) {
            }
            for (size_t i = 0; i < all.size(); ++i) CHECK(crowd.take(ids[i]).tokens == all[i].greedy);

            Engine kept(*l.model, *l.backend, {.context = 512, .cache_bytes = 64 << 20});
            const Golden& longest = all[1];  // cuts lie inside and between images
            REQUIRE(longest.images.size() == 3);
            CHECK(run(kept, request(l, longest)).tokens == longest.greedy);
            const Result again = run(kept, request(l, longest));
            CHECK(again.cached_tokens >= 128);
            CHECK(again.tokens == longest.greedy);
            Request other = request(l, longest);
            other.prompt.back() = (other.prompt.back() + 1) % 80;
            CHECK(run(kept, std::move(other)).cached_tokens >= 64);
        }
    }

    TEST_CASE("vision: a kept state is not used for another image") {
        const Loaded l("moe", on_cpu());
        const Golden g = goldens("moe")[1];
        Golden changed = g;
        changed.images[0].rgb[100] ^= 64;
        Engine fresh(*l.model, *l.backend, {.context = 512});
        const std::vector<int32_t> expected = run(fresh, request(l, changed)).tokens;
        Engine kept(*l.model, *l.backend, {.context = 512, .cache_bytes = 64 << 20});
        run(kept, request(l, g));
        const Result result = run(kept, request(l, changed));
        CHECK(result.cached_tokens <= 71);  // the text before the image
        CHECK(result.tokens == expected);
    }

    TEST_CASE("vision: drafts by the MTP layer leave answers about images as they are") {
        const Loaded l("dense", on_cpu());
        SpeculationOptions speculation;
        speculation.kind = DrafterKind::mtp;
        Engine engine(*l.model, *l.backend,
                      {.context = 512, .cache_bytes = 64 << 20, .speculation = speculation});
        for (const Golden& g : goldens("dense"))
            for (int i = 0; i < 2; ++i) CHECK(run(engine, request(l, g)).tokens == g.greedy);
    }

    TEST_CASE("vision: prompts whose images do not fit are refused") {
        const Loaded l("moe", on_cpu());
        const Golden g = goldens("moe")[2];
        Engine engine(*l.model, *l.backend, {.context = 512});
        Request r = request(l, g);
        r.images.pop_back();
        CHECK_THROWS_AS(engine.submit(std::move(r)), Error);
        r = request(l, g);
        std::swap(r.images[0], r.images[1]);
        CHECK_THROWS_AS(engine.submit(std::move(r)), Error);
        r = request(l, g);
        r.images.push_back(r.images[0]);
        CHECK_THROWS_AS(engine.submit(std::move(r)), Error);

        const test::Loaded text(vision_folder("moe") + "/checkpoint", on_cpu());
        CHECK(!text.model->info().vision);
        Engine blind(*text.model, *text.backend, {.context = 512});
        CHECK_THROWS_AS(blind.submit(request(l, g)), Error);
    }

    TEST_CASE("vision: a tower is loaded whole or not at all") {
        const auto backend = on_cpu();
        const std::string copy = (fs::temp_directory_path() / "quern-vision-part").string();
        fs::remove_all(copy);
        fs::copy(vision_folder("moe") + "/checkpoint", copy);
        std::string file;
        {
            std::ifstream in(copy + "/model.safetensors", std::ios::binary);
            file.assign(std::istreambuf_iterator<char>(in), {});
        }
        const std::string name = "model.visual.blocks.1.norm2.bias";
        file.replace(file.find(name), name.size(), "model.visual.blocks.1.norm2.biaz");
        std::ofstream(copy + "/model.safetensors", std::ios::binary) << file;
        std::string message;
        try {
            load_model(copy, *backend, {.tokenizer = false, .vision = true});
        } catch (const Error& error) {
            message = error.what();
        }
        CHECK(message.find(name) != std::string::npos);
        fs::remove_all(copy);
    }
}

}  // namespace quern
