// Packed KV caches in the engine: an answer's bits depend on its request and the format alone; kept states, their file, drafts;
// what a format costs, and when that is refused.
#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>

#include "checkpoint_writer.h"
#include "counted_backend.h"
#include "demo_copy.h"
#include "engine_harness.h"
#include "ggml-like/error.h"
#include "tools/common/loading.h"
#include "tools/engine/kv_cost.h"
#include "tools/engine/kv_types.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/replay_drafter.h"

namespace quern {
namespace {

using test::cpu, test::device, test::parity, test::random_ids;

constexpr const char* kPacked[] = {"fp8", "nvfp4", "tq4", "k8v4"};

struct Answer {
    std::vector<int32_t> tokens;
    std::vector<float> logits;

    bool operator==(const Answer& o) const {
        return tokens == o.tokens && logits.size() == o.logits.size() &&
               std::memcmp(logits.data(), o.logits.data(), logits.size() * sizeof(float)) == 0;
    }
};

Request recorded(std::vector<int32_t> prompt, unsigned number, Answer& to) {
    Request r;
    r.sampling.temperature = number % 2 == 0 ? 0.0f : 1.0f;
    r.sampling.seed = number;
    r.max_tokens = 12 + number;
    r.boundaries = {static_cast<int64_t>(prompt.size() / 2)};
    r.prompt = std::move(prompt);
    r.drafts.full = true;
    r.on_logits = [&to](int32_t, std::span<const float> row) {
        to.logits.insert(to.logits.end(), row.begin(), row.end());
    };
    return r;
}

std::vector<std::vector<int32_t>> some_prompts(const Model& model) {
    std::vector<std::vector<int32_t>> list;
    for (unsigned i = 0; i < 6; ++i) list.push_back(random_ids(model, 1 + i * 61, i % 2));
    return list;
}

std::vector<Answer> together(Engine& engine, const std::vector<std::vector<int32_t>>& prompts) {
    std::vector<Answer> answers(prompts.size());
    std::vector<RequestId> ids;
    for (unsigned i = 0; i < prompts.size(); ++i)
        ids.push_back(engine.submit(recorded(prompts[i], i, answers[i])));
    while (engine.step()) {
    }
    for (size_t i = 0; i < ids.size(); ++i) answers[i].tokens = engine.take(ids[i]).tokens;
    return answers;
}

std::vector<Answer> one_by_one(test::Loaded& l, const std::vector<std::vector<int32_t>>& prompts,
                               const char* type) {
    std::vector<Answer> answers(prompts.size());
    for (unsigned i = 0; i < prompts.size(); ++i)
        answers[i].tokens = Engine(*l.model, *l.backend, {.context = 512, .kv_type = type})
                                .run(recorded(prompts[i], i, answers[i]))
                                .tokens;
    return answers;
}

std::string message_of(const std::function<void()>& run, ErrorKind kind) {
    try {
        run();
    } catch (const Error& error) {
        CHECK(error.kind() == kind);
        return error.what();
    }
    return "";
}

TEST_SUITE("cpu") {
    TEST_CASE("packed KV caches: alone or beside others, steps of any size, kept states: the same bits" *
              doctest::test_suite("slow")) {
        for (const char* type : kPacked)
            for (const auto make : {cpu, device}) {
                CAPTURE(std::string(type));
                test::Loaded l(parity("base/ct"), make());
                const auto prompts = some_prompts(*l.model);
                const auto expected = one_by_one(l, prompts, type);
                CHECK(expected != one_by_one(l, prompts, "auto"));  // or the format would not be in use
                for (const int64_t rows : {64, 512})
                    for (const int64_t cache : {0, 64 << 20}) {
                        CAPTURE(rows);
                        CAPTURE(cache);
                        Engine engine(*l.model, *l.backend,
                                      {.context = 512,
                                       .sequences = 4,
                                       .step_tokens = rows,
                                       .kv_type = type,
                                       .cache_bytes = cache});
                        for (int round = 0; round < 2;
                             ++round)  // the second one with the states of the first
                            CHECK(together(engine, prompts) == expected);
                        CHECK((engine.cache_stats().hits > 0) == (cache > 0));
                    }
            }
    }

    TEST_CASE("packed KV caches: drafts, also of an MTP layer with its own packed cache, change no bit") {
        for (const char* type : kPacked) {
            CAPTURE(std::string(type));
            test::Loaded l(parity("vision_mtp/ct"), device());
            l.model = load_model(parity("vision_mtp/ct"), *l.backend,
                                 {.tokenizer = false, .mtp = MtpUse::required});
            const auto prompts = some_prompts(*l.model);
            const auto expected = one_by_one(l, prompts, type);
            auto replay = std::make_shared<ReplayDrafter>(std::vector<double>{0.9, 0.7, 0.5}, 5);
            for (size_t i = 0; i < prompts.size(); ++i) replay->expect(prompts[i], expected[i].tokens);
            for (const bool mtp : {false, true}) {
                CAPTURE(mtp);
                EngineOptions options{
                    .context = 512,
                    .sequences = 3,
                    .kv_type = type,
                    .cache_bytes = 16 << 20,
                    .speculation = {.kind = mtp ? DrafterKind::mtp : DrafterKind::automatic, .draft_max = 3}};
                if (!mtp) options.drafter = replay;
                Engine engine(*l.model, *l.backend, options);
                for (int round = 0; round < 2; ++round) CHECK(together(engine, prompts) == expected);
            }
        }
    }

    TEST_CASE("packed KV caches: a state file of one format is no file of another") {
        test::Loaded l(parity("base/ct"), cpu());
        const auto prompt = random_ids(*l.model, 300, 3);
        const auto request = [&] {
            Request r;
            r.prompt = prompt;
            r.max_tokens = 8;
            r.boundaries = {200};
            return r;
        };
        for (const char* type : kPacked) {
            CAPTURE(std::string(type));
            const test::TempDir directory;
            EngineOptions options{.context = 512, .kv_type = type, .cache_bytes = 64 << 20};
            Engine first(*l.model, *l.backend, options);
            CHECK(first.load_states(directory.str()).empty());
            const Result answer = first.run(request());
            CHECK(answer.cached_tokens == 0);
            CHECK(first.save_states([] { return true; }));
            Engine next(*l.model, *l.backend, options);
            CHECK(next.load_states(directory.str()).empty());
            const Result again = next.run(request());
            CHECK(again.cached_tokens == 256);
            CHECK(again.tokens == answer.tokens);
            for (const char* other : {"auto", "bf16", "fp8", "nvfp4", "tq4", "k8v4"}) {
                if (std::string(other) == type) continue;
                options.kv_type = other;
                Engine foreign(*l.model, *l.backend, options);
                CHECK(foreign.load_states(directory.str()).empty());
                CHECK(foreign.run(request()).cached_tokens == 0);
            }
        }
    }

    TEST_CASE("packed KV caches: the memory plan counts their bytes, and names what does not fit") {
        test::Loaded l(parity("base/ct"), cpu());  // one attention layer of four, 2 heads of 32
        const auto bytes = [&](const char* k, const char* v) {
            return make_memory_plan(*l.model, *l.backend, {.context = 256, .kv_type = k, .kv_type_v = v},
                                    true)
                .token_bytes;
        };
        CHECK(bytes("f32", "") == 2 * 2 * 128);
        CHECK(bytes("fp8", "") == 2 * 2 * 34);
        CHECK(bytes("nvfp4", "") == 2 * 2 * 20);
        CHECK(bytes("tq4", "") == 2 * (18 + 20));
        CHECK(bytes("fp8", "nvfp4") == 2 * (34 + 20));
        CHECK(bytes("bf16", "fp8") == 2 * (64 + 34));
        test::CountedBackend gpu(1ll << 32);
        CHECK(
            message_of([&] { make_memory_plan(*l.model, gpu, {.kv_type = "fp8", .kv_type_v = "f16"}, true); },
                       ErrorKind::usage)
                .find("fp8/f16 does not run on a GPU") != std::string::npos);
    }
}

TEST_SUITE("model") {
    TEST_CASE("packed KV caches: what fp8 costs the demo is measured" * doctest::test_suite("slow")) {
        const LoadedModel loaded =
            load_and_start({.gpu = GpuOptions::none, .engine = {.context = 256, .kv_type = "fp8"}});
        REQUIRE(loaded.kv_cost);
        CHECK(loaded.kv_cost->tokens == 2000);
        CHECK(loaded.kv_cost->kl_mean > 1e-5);
        CHECK(loaded.kv_cost->kl_mean < 0.02);
        CHECK(loaded.kv_cost->agreement > 0.95);
        CHECK(kv_name(loaded.engine->memory_plan().kv_types) == "fp8");
    }

    TEST_CASE("packed KV caches: what changes a model too much is refused, unless --allow-loss" *
              doctest::test_suite("slow")) {
        test::DemoCopy copy;  // whose logits are 64 times as large
        std::string& head = copy.weights.at("lm_head.weight").data;
        for (size_t i = 0; i < head.size(); i += 2) {
            uint16_t v;
            std::memcpy(&v, head.data() + i, 2);
            if ((v & 0x7f80) != 0) v = static_cast<uint16_t>(v + (6 << 7));
            std::memcpy(head.data() + i, &v, 2);
        }
        copy.write();
        LoadOptions options{.model = copy.dir.str(), .gpu = GpuOptions::none, .engine = {.kv_type = "nvfp4"}};
        CHECK(message_of([&] { load_and_start(options); }, ErrorKind::model)
                  .find("a KV cache in nvfp4 changes this model too much: mean KL ") != std::string::npos);
        options.allow_loss = true;
        CHECK(load_and_start(options).kv_cost->kl_mean > DenseCost::kMaxMeanKl);
    }
}

}  // namespace
}  // namespace quern
