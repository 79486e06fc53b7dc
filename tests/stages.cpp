// A model whose layers are on several devices gives the bits of one device, whatever the split, and keeps states as one does.
#include <doctest/doctest.h>

#include <chrono>
#include <filesystem>

#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "lazy_backend.h"
#include "rank_models.h"
#include "stage_models.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/replay_drafter.h"

namespace quern {
namespace {

using test::Outcome, test::random_ids, test::run, test::SplitModel;

using Shares = std::vector<double>;

std::string demo() { return test::source_dir() + "/models/demo"; }

/// Prompts of many lengths, which are read in chunks.
std::vector<std::vector<int32_t>> prompts_for(const Model& model) {
    std::vector<std::vector<int32_t>> prompts;
    for (unsigned i = 0; i < 5; ++i) prompts.push_back(random_ids(model, 1 + 47 * i, i));
    return prompts;
}

struct Bits {
    Outcome alone;
    std::vector<Outcome> together;
    friend bool operator==(const Bits&, const Bits&) = default;
};

Bits bits_of(const std::string& checkpoint, const Shares& shares, bool device) {
    const SplitModel l(checkpoint, shares, device);
    Engine engine(*l.model, *l.backend, {.context = 256, .sequences = 4, .step_tokens = 64});
    Bits bits{run(engine, random_ids(*l.model, 150, 5), true), {}};
    bits.together = test::run_together(engine, prompts_for(*l.model));
    CHECK(bits.alone.error == "");
    CHECK(bits.alone.logits.size() == 162 * static_cast<size_t>(l.model->info().vocab_rows));
    for (const Outcome& o : bits.together) CHECK(o.error == "");
    return bits;
}

std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

TEST_SUITE("cpu") {
    TEST_CASE("stages: two and three have the bits of one device, whatever their shares") {
        struct Case {
            const char* checkpoint;
            std::vector<Shares> splits;
        };
        for (const auto& [checkpoint, splits] :
             std::vector<Case>{{"base/ct", {{1, 1}, {3, 1}, {1, 3}, {1, 1, 1}, {2, 1, 1}}},
                               {"deep/bf16", {{3, 2}, {1, 1, 1}, {5, 2, 1}}},
                               {"odd_pattern/bf16", {{1, 1}, {1, 2, 1}}},
                               {"tied_text/bf16", {{1, 1}, {1, 1, 2}}},
                               {"dense/bf16", {{1, 1}}}}) {
            const std::string name = checkpoint;
            CAPTURE(name);
            for (const bool device : {false, true}) {
                CAPTURE(device);
                const Bits one = bits_of(test::parity(name), {1}, device);
                for (const Shares& shares : splits) {
                    CAPTURE(shares.size());
                    CAPTURE(shares[0]);
                    CHECK(bits_of(test::parity(name), shares, device) == one);
                }
            }
        }
    }

    TEST_CASE("stages: each has a step of its own, and devices that work late change nothing") {
        const std::string checkpoint = test::parity("deep/bf16");
        const EngineOptions options{.context = 512, .sequences = 5, .step_tokens = 64};
        // Some by their highest logits alone, some by all; one with a prompt of many steps.
        const auto answers = [&](Model& model, Backend& backend) {
            Engine engine(model, backend, options);
            std::vector<Outcome> out(7);
            std::vector<RequestId> ids;
            for (size_t i = 0; i < out.size(); ++i) {
                const auto seed = static_cast<unsigned>(i);
                Request r = test::recorded(random_ids(model, i == 2 ? 400 : 20 + 30 * i, seed), out[i],
                                           i >= 5, 10 + 3 * static_cast<int64_t>(i));
                if (i % 2 == 0) r.on_logits = {};
                if (i == 3) r.sampling = {.temperature = 1, .seed = 7};
                ids.push_back(engine.submit(std::move(r)));
                if (i > 3) engine.step();
            }
            engine.cancel(ids[1]);
            while (engine.step()) {
            }
            for (size_t i = 0; i < out.size(); ++i) test::take(engine, ids[i], out[i]);
            out[1] = {};  // how far it came depends on the others
            return out;
        };
        const SplitModel one(checkpoint, {1}, true);
        const std::vector<Outcome> expected = answers(*one.model, *one.backend);
        for (const Outcome& o : expected) CHECK(o.error == "");
        for (const int stages : {2, 3}) {
            CAPTURE(stages);
            const test::LazyStages lazy(stages);
            const auto model = load_model(checkpoint, *lazy.group, {.tokenizer = false});
            CHECK(answers(*model, *lazy.group) == expected);
            CHECK(lazy.each[0]->most_ahead == 2);
        }
    }

    TEST_CASE("stages: states that are copied late, and clients that leave, change nothing") {
        const std::string checkpoint = test::parity("deep/bf16");
        const EngineOptions options{
            .context = 512, .sequences = 3, .step_tokens = 64, .cache_bytes = 64 << 20};
        // Two turns of three conversations; beside each turn somebody leaves while a step is on its way.
        const auto answers = [&](Model& model, Backend& backend) {
            Engine engine(model, backend, options);
            std::vector<Outcome> out(6);
            Outcome left;
            for (size_t turn = 0; turn < 2; ++turn) {
                std::vector<RequestId> ids;
                const auto leaves = engine.submit(test::recorded(random_ids(model, 200, 9), left, false));
                for (size_t i = 0; i < 3; ++i) {
                    std::vector<int32_t> prompt = random_ids(model, 300, static_cast<unsigned>(i));
                    for (size_t more = 0; more < 40 * turn; ++more)
                        prompt.push_back(static_cast<int32_t>(3 + (more + i) % 9));
                    ids.push_back(engine.submit(test::recorded(prompt, out[3 * turn + i], false)));
                }
                for (size_t step = 0; step < 2 + turn; ++step) engine.step();
                engine.cancel(leaves);
                engine.step();
                REQUIRE(engine.finished(leaves));
                CHECK(engine.take(leaves).reason == FinishReason::cancelled);
                while (engine.step()) {
                }
                for (size_t i = 0; i < 3; ++i) test::take(engine, ids[i], out[3 * turn + i]);
            }
            return out;
        };
        const SplitModel one(checkpoint, {1}, true);
        const std::vector<Outcome> expected = answers(*one.model, *one.backend);
        for (size_t i = 0; i < expected.size(); ++i) {
            CHECK(expected[i].error == "");
            CHECK(expected[i].cached == (i < 3 ? 0 : 256));
        }
        for (const int stages : {1, 2, 3})
            for (const bool near : {true, false}) {
                CAPTURE(stages);
                CAPTURE(near);
                const test::LazyStages lazy(stages);
                for (test::LazyBackend* stage : lazy.each) stage->exact = near;
                const auto model = load_model(checkpoint, *lazy.group, {.tokenizer = false});
                CHECK(answers(*model, *lazy.group) == expected);
            }
    }

    TEST_CASE("stages: drafts, right and wrong ones, change nothing") {
        const auto answer = [](const Shares& shares, const std::shared_ptr<Drafter>& drafter) {
            const SplitModel l(demo(), shares, true);
            EngineOptions options{.context = 512, .drafter = drafter};
            options.speculation.kind = drafter != nullptr ? DrafterKind::lookup : DrafterKind::none;
            Engine engine(*l.model, *l.backend, options);
            Outcome out;
            Request r = test::recorded(random_ids(*l.model, 70, 3), out, false, 60);
            r.drafts.full = drafter != nullptr;
            const RequestId id = engine.submit(std::move(r));
            while (!engine.finished(id)) engine.step();
            test::take(engine, id, out);
            CHECK(out.error == "");
            if (drafter != nullptr) CHECK(engine.speculation()->accepted > 20);
            return out;
        };
        const Outcome one = answer({1}, nullptr);
        CHECK(one.tokens.size() == 60);
        for (const Shares& shares : std::vector<Shares>{{1}, {3, 2}, {1, 1, 1}}) {
            CAPTURE(shares.size());
            const auto drafter = std::make_shared<ReplayDrafter>(std::vector<double>{0.9, 0.6, 0.4});
            const auto whole = open_model(demo(), {.tokenizer = false});
            drafter->expect(random_ids(*whole, 70, 3), one.tokens);
            CHECK(answer(shares, drafter) == one);
        }
    }

    TEST_CASE("stages: follow-ups go on from kept states, also those that another split has written") {
        const std::string checkpoint = test::parity("deep/bf16");
        const test::TempDir dir;
        const EngineOptions options{.context = 512, .sequences = 2, .cache_bytes = 64 << 20};
        const auto prompt_of = [](const Model& m, size_t more) {
            std::vector<int32_t> ids = random_ids(m, 300, 21);
            for (size_t i = 0; i < more; ++i) ids.push_back(static_cast<int32_t>(3 + i % 9));
            return ids;
        };
        for (const bool device : {false, true}) {
            CAPTURE(device);
            const std::string folder = dir / (device ? "device" : "cpu");
            Outcome cold;
            {
                const SplitModel l(checkpoint, {1}, device);
                EngineOptions none = options;
                none.cache_bytes = 0;
                Engine engine(*l.model, *l.backend, none);
                cold = run(engine, prompt_of(*l.model, 40));
            }
            bool first = true;
            for (const Shares& shares : std::vector<Shares>{{1, 1}, {5, 1, 2}, {1}, {1, 3}}) {
                CAPTURE(shares.size());
                const SplitModel l(checkpoint, shares, device);
                Engine engine(*l.model, *l.backend, options);
                CHECK(engine.load_states(folder) == "");
                if (first) {
                    CHECK(run(engine, prompt_of(*l.model, 0)).cached == 0);
                    const Outcome near = run(engine, prompt_of(*l.model, 40));
                    CHECK(near.cached == 256);
                    CHECK(near.logits == cold.logits);
                }
                first = false;
                const Outcome warm = run(engine, prompt_of(*l.model, 40));
                CHECK(warm.cached >= 256);
                CHECK(warm.tokens == cold.tokens);
                CHECK(warm.logits == cold.logits);
                REQUIRE(engine.save_states([] { return true; }));
            }
            // One name for all splits
            std::vector<std::filesystem::path> files;
            for (const auto& entry : std::filesystem::directory_iterator(folder))
                files.push_back(entry.path());
            CHECK(files.size() == 1);
        }
    }

    TEST_CASE("stages: each places its own layers and states only, as its memory plan says") {
        const std::string checkpoint = test::parity("deep/bf16");
        test::DeviceStages stages(3);
        const auto model = open_for(*stages.group, {5, 2, 1}, {.tokenizer = false},
                                    [&](const OpenOptions& o) { return open_model(checkpoint, o); });
        const auto whole = open_model(checkpoint, {.tokenizer = false});
        const EngineOptions options{.context = 256, .sequences = 2};
        const MemoryPlan plan = make_memory_plan(*model, *stages.group, options, false);
        REQUIRE(plan.stages.size() == 3);
        place_weights(*model, *stages.group);
        const std::vector<LayerRange> ranges = {{0, 5}, {5, 7}, {7, 8}};
        std::vector<int64_t> placed;
        for (int s = 0; s < 3; ++s) {
            CAPTURE(s);
            const auto i = static_cast<size_t>(s);
            CHECK(model->of_stage(s).own_layers() == ranges[i]);
            CHECK(stages.each[i]->used == plan.stages[i].weight_bytes());
            placed.push_back(stages.each[i]->used);
            bool embedding = false, head = false;
            for (const WeightUse& use : model->of_stage(s).weights().uses) {
                if (use.layer >= 0) CHECK(ranges[i].has(use.layer));
                embedding |= use.group == std::string("embedding");
                head |= use.group == std::string("head");
            }
            CHECK(embedding == (s == 0));
            CHECK(head == (s == 2));
            for (const StateSpec& spec : plan.stages[i].specs) CHECK(ranges[i].has(spec.layer));
        }
        // Nothing twice but the norm on each side of a border
        int64_t bytes = 0;
        for (const WeightUse& use : whole->weights().uses) bytes += use.bytes();
        int64_t split = 0;
        for (const WeightUse& use : model->weights().uses) split += use.bytes();
        CHECK(split == bytes + 2 * whole->info().width * int64_t{sizeof(float)});

        const Engine engine(*model, *stages.group, options);
        for (size_t i = 0; i < 3; ++i) {
            CAPTURE(i);
            const MemoryPlan& own = plan.stages[i];
            CHECK(stages.each[i]->used - placed[i] == own.state_bytes() + own.scratch_bytes());
        }
    }

    TEST_CASE(
        "stages: without shares layers go where memory is free, and the fullest device decides the context") {
        const std::string checkpoint = test::parity("deep/bf16");
        const auto opened = [&](const Backend& group) {
            return open_for(group, {}, {.tokenizer = false},
                            [&](const OpenOptions& o) { return open_model(checkpoint, o); });
        };
        constexpr int64_t kBig = 3ll << 30, kSmall = 1ll << 30;
        test::DeviceStages uneven({kBig, kSmall});
        const auto model = opened(*uneven.group);
        const int first = model->of_stage(0).own_layers().count();
        CHECK(first > 4);
        CHECK(first < 8);
        // So little on the second that half of its KV cache has no room
        const EngineOptions options{.sequences = 64, .step_tokens = 64};
        test::DeviceStages wide(2);
        const auto other = open_for(*wide.group, {1, 1}, {.tokenizer = false},
                                    [&](const OpenOptions& o) { return open_model(checkpoint, o); });
        const MemoryPlan all = make_memory_plan(*other, *wide.group, options, false);
        CHECK(all.context == all.model_context);
        test::DeviceStages tight({int64_t{1} << 34, all.stages[1].needed() - all.stages[1].kv / 2});
        const MemoryPlan plan = make_memory_plan(*other, *tight.group, options, false);
        CHECK(plan.context_chosen);
        CHECK(plan.context < plan.model_context);
        CHECK(plan.context == plan.stages[1].context);
        CHECK(plan.context == plan.stages[0].context);
        CHECK(error_of([&] { require_fit(plan); }) == "");
        // However much is left over of a page for each sequence, logits of steps on their way have room
        const int64_t pages = page_bytes(all.stages[1].specs) * options.sequences;
        for (int64_t part = 0; part < 32; ++part) {
            CAPTURE(part);
            test::DeviceStages device(
                {int64_t{1} << 34, all.stages[1].needed() - all.stages[1].kv / 2 + part * pages / 32});
            const MemoryPlan fitting = make_memory_plan(*other, *device.group, options, false);
            CHECK(fitting.stages[1].results > pages / 32);
            CHECK(error_of([&] { require_fit(fitting); }) == "");
        }
        EngineOptions more = options;
        more.context = plan.context + 64;
        const std::string error =
            error_of([&] { require_fit(make_memory_plan(*other, *tight.group, more, false)); });
        CHECK(error.find("device 2 of 2 (layers 4-7, head)") != std::string::npos);
        CHECK(error.find("give this device fewer layers with -ts") != std::string::npos);
        CHECK(describe(plan).find("device 1 of 2 (embedding, layers 0-3)") != std::string::npos);
    }

    TEST_CASE("stages: one that fails ends all requests at once") {
        for (const size_t failing : {0u, 1u, 2u}) {
            CAPTURE(failing);
            test::DeviceStages stages(3);
            const auto model = load_model(test::parity("deep/bf16"), *stages.group, {.tokenizer = false});
            Engine engine(*model, *stages.group, {.context = 256, .sequences = 2});
            std::vector<RequestId> ids;
            for (unsigned i = 0; i < 3; ++i) {
                Request r;
                r.prompt = random_ids(*model, 30, i);
                r.max_tokens = 100;
                ids.push_back(engine.submit(std::move(r)));
            }
            for (int i = 0; i < 4; ++i) engine.step();
            stages.each[failing]->before_run = [] { throw Error(ErrorKind::device, "stage on fire"); };
            CHECK_THROWS_WITH_AS(engine.step(), "stage on fire", Error);
            for (const RequestId id : ids) {
                REQUIRE(engine.finished(id));
                CHECK(engine.take(id).error == "stage on fire");
            }
        }
    }

    TEST_CASE("stages: what cannot be split is refused, with what to do") {
        const auto refusal = [](const std::string& checkpoint, const Shares& shares,
                                OpenOptions options = {}) {
            options.tokenizer = false;
            return error_of([&] { SplitModel(checkpoint, shares, false, options); });
        };
        CHECK(refusal(test::parity("dense/bf16"), {1, 1, 1}).find("has 2 layers, too few for 3 devices") !=
              std::string::npos);
        CHECK(refusal(demo(), {1, 1}) == "");
    }
}

TEST_SUITE("gpus") {
    TEST_CASE("gpu stages: two GPUs have the bits of one, in every format") {
        const auto bits = [](const std::string& checkpoint, std::unique_ptr<Backend> backend) {
            const test::Loaded l(checkpoint, std::move(backend));
            Engine engine(*l.model, *l.backend, {.context = 512, .sequences = 4, .step_tokens = 128});
            Bits found{run(engine, random_ids(*l.model, 300, 5), true), {}};
            found.together = test::run_together(engine, prompts_for(*l.model));
            CHECK(found.alone.error == "");
            return found;
        };
        for (const bool dense : {false, true})
            for (const std::string format : {"bf16", "nvfp4", "fp8", "fp8-block", "fp8-tensor"}) {
                CAPTURE(dense);
                CAPTURE(format);
                const std::string checkpoint = test::rank_model(dense).in(format);
                CHECK(bits(checkpoint, make_cuda_stages({0, 1})) == bits(checkpoint, make_cuda_stages({0})));
            }
        CHECK(bits(demo(), make_cuda_stages({1, 0})) == bits(demo(), make_cuda_stages({0})));
    }

    TEST_CASE("gpu stages: a state that one GPU has kept goes on on two") {
        const test::TempDir dir;
        const EngineOptions options{.context = 512, .cache_bytes = 64 << 20};
        Outcome cold;
        for (const std::vector<int>& devices : {std::vector{0}, std::vector{0, 1}}) {
            const test::Loaded l(demo(), make_cuda_stages(devices));
            Engine engine(*l.model, *l.backend, options);
            CHECK(engine.load_states(dir / "states") == "");
            const Outcome found = run(engine, random_ids(*l.model, 300, 4));
            if (devices.size() == 1)
                cold = found;
            else
                CHECK(found.cached == 256);
            CHECK(found.logits == cold.logits);
            CHECK(run(engine, random_ids(*l.model, 300, 4)).logits == cold.logits);
            REQUIRE(engine.save_states([] { return true; }));
        }
    }
}

}  // namespace
}  // namespace quern
