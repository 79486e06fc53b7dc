// The tower's steps: large images are encoded in several, so that answers go on; several small ones in one; nothing twice.
#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint_writer.h"
#include "ops/second_backend.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/tower_plan.h"
#include "vision_models.h"

namespace quern {
namespace {

namespace fs = std::filesystem;
using namespace test;

/// The MoE model, which reads images of up to 1,024 patches.
struct Large {
    explicit Large(std::unique_ptr<Backend> on = make_cpu_backend(2),
                   const OpenOptions& options = {.tokenizer = false, .vision = true})
        : backend(std::move(on)) {
        const fs::path to = fs::path(dir.str()) / "model";
        fs::copy(vision_folder("moe") + "/checkpoint", to);
        std::ofstream(to / "preprocessor_config.json")
            << R"({"size": {"shortest_edge": 1024, "longest_edge": 65536}})";
        model = load_model(to.string(), *backend, options);
    }

    ImagePtr image(int64_t side, unsigned seed) const {
        std::mt19937 random(seed);
        Image pixels{side, side, std::vector<uint8_t>(static_cast<size_t>(3 * side * side))};
        for (uint8_t& v : pixels.rgb) v = static_cast<uint8_t>(random());
        return std::make_shared<const ImagePart>(model->read_image(pixels, model->info().vision->sizes));
    }
    static Request about(const std::vector<ImagePtr>& images, size_t before = 3) {
        Request r{.prompt = std::vector<int32_t>(before, 7), .images = images};
        for (const ImagePtr& image : images)
            r.prompt.insert(r.prompt.end(), image->keys.begin(), image->keys.end());
        r.prompt.insert(r.prompt.end(), {8, 9});
        r.sampling.temperature = 0;
        r.max_tokens = 6;
        return r;
    }

    TempDir dir;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
};

struct Run {
    std::vector<int32_t> tokens;
    std::vector<float> logits;
    bool operator==(const Run&) const = default;
};

Run run(Engine& engine, Request r) {
    Run out;
    r.on_logits = [&](int32_t, std::span<const float> row) {
        out.logits.insert(out.logits.end(), row.begin(), row.end());
    };
    const Result result = engine.run(std::move(r));
    CHECK(result.error == "");
    out.tokens = result.tokens;
    return out;
}

/// Steps until the request has ended in which its prompt did not move: those of the tower.
int steps_without_prompt(Engine& engine, Request r) {
    int64_t moved = 0, idle = 0;
    int64_t progress = 0;
    r.on_prefill = [&](int64_t tokens) { progress = tokens; };
    r.max_tokens = 1;
    const RequestId id = engine.submit(std::move(r));
    for (bool more = true; more;) {
        more = engine.step();
        idle += progress == moved;
        moved = progress;
    }
    CHECK(engine.take(id).error == "");
    return static_cast<int>(idle);
}

constexpr int64_t kStep = 64;  // rows of a prompt step: 256 patches
EngineOptions small_steps(int64_t cache = 0) {
    return {.context = 1024, .sequences = 3, .step_tokens = kStep, .cache_bytes = cache};
}

void check_parts(const Large& l) {
    Engine whole(*l.model, *l.backend, {.context = 1024, .step_tokens = 1024});
    Engine parts(*l.model, *l.backend, small_steps());
    for (const int64_t side :
         {256, 176, 240}) {  // 1,024 patches, rows of a block a step; 484, a block a step; 900
        CAPTURE(side);
        const ImagePtr image = l.image(side, 1);
        const Run expected = run(whole, Large::about({image}));
        CHECK(run(parts, Large::about({image})) == expected);
    }
}

std::vector<float> fp8_features(std::unique_ptr<Backend> backend, const std::vector<ImagePtr>& images) {
    Seeing l("moe", std::move(backend));
    l.model = load_model(vision_folder("moe") + "/checkpoint", *l.backend,
                         {.tokenizer = false, .vision = true, .vision_format = DenseFormat::fp8});
    requantize_weights(*l.model, *l.backend);
    return features(l, images);
}

}  // namespace

TEST_SUITE("cuda") {
    TEST_CASE("tower: a large image in several steps gives the same bits (CUDA)") {
        check_parts(Large(make_test_cuda_backend()));
    }

    TEST_CASE("tower: --vision fp8 gives the CPU's features (CUDA)") {
        const std::vector<ImagePtr> images = {Large().image(64, 10)};
        CHECK(relative(fp8_features(make_test_cuda_backend(), images),
                       fp8_features(make_cpu_backend(2), images)) < 0.03);
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("tower: a large image in several steps gives the same bits") {
        check_parts(Large());
        const Large l;
        Engine engine(*l.model, *l.backend, small_steps());
        CHECK(steps_without_prompt(engine, Large::about({l.image(176, 1)})) == 3);  // one for each block
        // the patches, then four parts of each block
        CHECK(steps_without_prompt(engine, Large::about({l.image(256, 1)})) == 1 + 3 * 4);
    }

    TEST_CASE("tower: no step of the 35B's tower does more than 7.2 TFLOP, and together they do all of it") {
        constexpr double kPatches = 2.0 * 1536 * 1152, kQkv = 2.0 * 3 * 1152 * 1152,
                         kRest = kQkv / 3 + 4.0 * 4304 * 1152;
        const VisionInfo vision{.merge = 2, .blocks = 27, .inner_width = 1152};
        const int64_t most = tower_step_patches(vision, {.prompt_rows = 8192, .gap_rows = 1408});
        for (const int64_t patches : {4096, 5632, 16384, 36000, 36100, 65536}) {
            const std::vector<TowerStep> steps = tower_steps(vision, patches, most);
            const auto n = static_cast<double>(patches);
            int64_t block = 0, row = 0;
            double largest = 0;
            for (const TowerStep& s : steps) {
                CHECK(s.begin == block);
                CHECK(s.first == row);
                const auto rows = static_cast<double>(s.rows > 0 ? s.rows : patches);
                largest = std::max(largest, static_cast<double>(s.end - s.begin) *
                                                    (n * kQkv + rows * (kRest + 4 * n * 1152)) +
                                                (&s == steps.data() ? n * kPatches : 0));
                row = s.first + s.rows == patches ? 0 : s.first + s.rows;
                if (row == 0) block = s.end;
            }
            CHECK(block == 27);
            CHECK(largest < 7.2e12);
            CHECK(static_cast<double>(steps.size()) < 2 + 27 * n * (kQkv + kRest + 4 * n * 1152) / 3e12);
        }
        CHECK(tower_steps(vision, 4096, most).size() == 1);  // 1024 x 1024 pixels
    }

    TEST_CASE("tower: answers go on while a large image is encoded") {
        const Large l;
        Engine engine(*l.model, *l.backend, small_steps());
        int64_t answered = 0;
        Request text{.prompt = {1, 2, 3}};
        text.max_tokens = 200;
        text.on_token = [&](int32_t) { return ++answered > 0; };
        engine.submit(std::move(text));
        while (answered < 3) engine.step();
        bool there = false;
        Request seeing = Large::about({l.image(256, 2), l.image(240, 3)});
        seeing.on_token = [&](int32_t) { return there = true; };
        engine.submit(std::move(seeing));
        int steps = 0, waited = 0, longest = 0;
        for (int64_t before = answered;; before = answered) {
            if (there) break;
            engine.step();
            ++steps;
            waited = answered > before ? 0 : waited + 1;
            longest = std::max(longest, waited);
        }
        CHECK(longest == 1);
        CHECK(steps > 2 * (13 + 10));  // both images, some rows of a block at a time
    }

    TEST_CASE("tower: who leaves in the middle of an image spoils nothing for others") {
        const Large l;
        const ImagePtr first = l.image(256, 4), second = l.image(240, 5);
        Engine fresh(*l.model, *l.backend, small_steps());
        const Run expected = run(fresh, Large::about({second})),
                  expected_first = run(fresh, Large::about({first}));
        for (const int steps : {1, 2, 6}) {
            Engine engine(*l.model, *l.backend, small_steps());
            const RequestId leaving = engine.submit(Large::about({first}));
            for (int i = 0; i < steps; ++i) engine.step();
            engine.cancel(leaving);
            CHECK(run(engine, Large::about({second})) == expected);
            CHECK(run(engine, Large::about({first})) == expected_first);
        }
    }

    TEST_CASE("tower: small images share a step, and none is encoded twice within the cache") {
        const Large l;
        const std::vector<ImagePtr> images = {l.image(64, 6), l.image(64, 7),
                                              l.image(80, 8)};  // 64, 64, 100 patches
        Engine engine(*l.model, *l.backend, small_steps(64 << 20));
        Engine apart(*l.model, *l.backend, small_steps());
        const Run expected = run(apart, Large::about(images, 70));
        CHECK(steps_without_prompt(engine, Large::about(images)) == 1);
        CHECK(steps_without_prompt(engine, Large::about(images, 70)) == 0);
        CHECK(run(engine, Large::about(images, 70)) == expected);
        const ImagePtr large = l.image(256, 9);
        CHECK(steps_without_prompt(engine, Large::about({large})) == 13);
        CHECK(steps_without_prompt(engine, Large::about({large}, 70)) == 0);
        CHECK(steps_without_prompt(apart, Large::about(images, 69)) == 1);  // without a cache again
    }

    TEST_CASE("tower: what images before have left is a part of the cache's memory, and of the plan") {
        const Large l;
        const MemoryPlan plan = make_memory_plan(*l.model, *l.backend, small_steps(64 << 20), true);
        CHECK(plan.features == 16 << 20);
        CHECK(plan.between >= 2 * 1024 * 144 * 4);  // a block's rows go where none of them is read
        CHECK(make_memory_plan(*l.model, *l.backend, {.context = 1024, .step_tokens = 4096}, true).features ==
              0);
    }

    TEST_CASE("tower: --vision fp8 halves its matrices and changes features a little") {
        const Large stored, packed(make_cpu_backend(2),
                                   {.tokenizer = false, .vision = true, .vision_format = DenseFormat::fp8});
        CHECK(!packed.model->weights().changes.empty());
        requantize_weights(*packed.model, *packed.backend);
        const auto bytes = [](const Large& l) {
            int64_t sum = 0;
            for (const WeightUse& use : std::as_const(*l.model).weights().uses)
                if (use.vision && use.matrix != nullptr) sum += use.bytes();
            return sum;
        };
        CHECK(bytes(packed) < 0.53 * static_cast<double>(bytes(stored)));
        CHECK(packed.model->digest() != stored.model->digest());
        const Seeing plain("moe", make_cpu_backend(2));
        const std::vector<ImagePtr> images = {stored.image(64, 10)};
        const double change = relative(fp8_features(make_cpu_backend(2), images), features(plain, images));
        CHECK(change > 0.005);
        CHECK(change < 0.1);
    }
}

}  // namespace quern
