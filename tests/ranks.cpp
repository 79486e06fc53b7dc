// A model that several ranks run together gives the answers of one rank, whatever its formats, and each answer depends on its
// request alone.
#include <doctest/doctest.h>

#include <chrono>

#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "ggml-like/ops/all_reduce_add.h"
#include "models/model_group.h"
#include "rank_models.h"
#include "tools/engine/memory_plan.h"

namespace quern {
namespace {

using test::random_ids, test::rank_model;

constexpr int kPromptTokens = 90, kAnswerTokens = 12;

/// A prompt's logits and the greedy answer, with the logits that its tokens were chosen from.
struct Outcome {
    std::vector<int32_t> tokens;
    std::vector<float> logits;
    std::string error;
    int64_t cached = 0;
};

Request recorded(std::vector<int32_t> prompt, Outcome& to, bool prompt_logits) {
    Request r;
    r.prompt = std::move(prompt);
    r.sampling.temperature = 0;
    r.max_tokens = kAnswerTokens;
    const auto append = [&to](std::span<const float> row) {
        to.logits.insert(to.logits.end(), row.begin(), row.end());
    };
    r.on_logits = [append](int32_t, std::span<const float> row) { append(row); };
    if (prompt_logits)
        r.on_prompt_logits = [append](const PromptLogits& rows) {
            for (size_t i = 0; i < rows.count(); ++i) append(rows.row(i));
        };
    return r;
}

void take(Engine& engine, RequestId id, Outcome& to) {
    Result result = engine.take(id);
    to.tokens = std::move(result.tokens);
    to.error = result.error;
    to.cached = result.cached_tokens;
}

Outcome run(Engine& engine, std::vector<int32_t> prompt, bool prompt_logits = false) {
    Outcome out;
    const RequestId id = engine.submit(recorded(std::move(prompt), out, prompt_logits));
    while (!engine.finished(id)) engine.step();
    take(engine, id, out);
    return out;
}

Outcome on_ranks(const std::string& checkpoint, std::unique_ptr<Backend> backend) {
    const test::Loaded l(checkpoint, std::move(backend));
    Engine engine(*l.model, *l.backend, {.context = 256, .step_tokens = 64});
    Outcome out = run(engine, random_ids(*l.model, kPromptTokens, 5), true);
    CHECK(out.error == "");
    CHECK(out.logits.size() ==
          (kPromptTokens + kAnswerTokens) * static_cast<size_t>(l.model->info().vocab_rows));
    return out;
}

/// |a - b| / |b| over all logits.
double difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double squares = 0, all = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        squares += std::pow(static_cast<double>(a[i]) - b[i], 2);
        all += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(squares / all);
}

/// The rows of b that were computed from the tokens of a: all up to that from which one of them chose another token.
std::vector<float> same_rows(const Outcome& a, const Outcome& b) {
    const auto parts = std::mismatch(a.tokens.begin(), a.tokens.end(), b.tokens.begin(), b.tokens.end());
    const auto later = std::max<int64_t>(0, a.tokens.end() - parts.first - 1);
    const auto width = b.logits.size() / (kPromptTokens + kAnswerTokens);
    return {b.logits.begin(), b.logits.end() - later * static_cast<int64_t>(width)};
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
    TEST_CASE("ranks: two and four give the logits and the tokens of one, in every format") {
        for (const bool dense : {false, true})
            for (const std::string format : {"bf16", "nvfp4", "fp8", "fp8-block", "fp8-tensor"}) {
                CAPTURE(dense);
                CAPTURE(format);
                const std::string checkpoint = rank_model(dense).in(format);
                const Outcome one = on_ranks(checkpoint, test::cpu());
                for (const int ranks : {2, 4}) {
                    CAPTURE(ranks);
                    const Outcome several = on_ranks(checkpoint, make_cpu_backends(2, ranks));
                    CHECK(difference(several.logits, one.logits) < 1e-6);
                    CHECK(several.tokens == one.tokens);
                }
            }
    }

    TEST_CASE("ranks: an answer has the same bits alone and in a crowd, on devices too") {
        const std::string checkpoint = rank_model().in("nvfp4");
        std::vector<Outcome> first;
        for (const bool device : {false, true}) {
            CAPTURE(device);
            auto backend = device ? std::move(test::DeviceRanks(2).group) : make_cpu_backends(2, 2);
            const test::Loaded l(checkpoint, std::move(backend));
            Engine engine(*l.model, *l.backend, {.context = 256, .sequences = 5});
            std::vector<std::vector<int32_t>> prompts;
            for (unsigned i = 0; i < 5; ++i) prompts.push_back(random_ids(*l.model, 1 + 37 * i, i));
            std::vector<Outcome> alone, crowd(prompts.size());
            for (const auto& prompt : prompts) alone.push_back(run(engine, prompt));
            std::vector<RequestId> ids;
            for (size_t i = 0; i < prompts.size(); ++i) {
                ids.push_back(engine.submit(recorded(prompts[i], crowd[i], false)));
                engine.step();
            }
            while (engine.step()) {
            }
            for (size_t i = 0; i < prompts.size(); ++i) {
                CAPTURE(i);
                take(engine, ids[i], crowd[i]);
                CHECK(crowd[i].error == "");
                CHECK(crowd[i].tokens == alone[i].tokens);
                CHECK(crowd[i].logits == alone[i].logits);
                if (device) CHECK(crowd[i].logits == first[i].logits);
            }
            first = std::move(alone);
        }
    }

    TEST_CASE("ranks: sampling draws from the merged head what it draws from the whole one") {
        const std::string checkpoint = rank_model().in("bf16");
        std::vector<std::vector<int32_t>> answers;
        for (const int ranks : {1, 2, 4}) {
            const test::Loaded l(checkpoint, make_cpu_backends(2, ranks));
            Engine engine(*l.model, *l.backend, {.context = 256});
            Request r;
            r.prompt = random_ids(*l.model, 40, 3);
            r.max_tokens = 100;
            r.sampling = {.temperature = 1.5f, .top_k = 40, .seed = 9};
            answers.push_back(engine.run(std::move(r)).tokens);
            CHECK(answers.back().size() == 100);
        }
        CHECK(answers[1] == answers[0]);
        CHECK(answers[2] == answers[0]);
    }

    TEST_CASE("ranks: those whose rows of the head are all beyond the vocabulary change nothing") {
        const test::RankModel long_head(false, 8192, test::source_dir() + "/models/demo");
        for (const float temperature : {0.0f, 1.0f}) {
            CAPTURE(temperature);
            std::vector<std::vector<int32_t>> answers;
            for (const int ranks : {1, 2, 4}) {
                const test::Loaded l(long_head.in("bf16"), make_cpu_backends(2, ranks), true);
                CHECK(l.model->info().vocab < l.model->info().vocab_rows / 2);
                Engine engine(*l.model, *l.backend, {.context = 256});
                Request r;
                r.prompt = random_ids(*l.model, 40, 3);
                for (int32_t& id : r.prompt) id %= static_cast<int32_t>(l.model->info().vocab);
                r.max_tokens = 40;
                r.sampling = {.temperature = temperature, .top_k = 20, .top_p = 0.95f, .seed = 9};
                Result result = engine.run(std::move(r));
                CHECK(result.error == "");
                answers.push_back(std::move(result.tokens));
            }
            CHECK(answers[0].size() == 40);
            CHECK(answers[1] == answers[0]);
            CHECK(answers[2] == answers[0]);
        }
    }

    TEST_CASE("ranks: going on from a kept state changes nothing, nor does a file that was written before") {
        const std::string checkpoint = rank_model().in("fp8");
        const test::TempDir dir;
        const auto options = [](int64_t bytes) {
            return EngineOptions{.context = 512, .cache_bytes = bytes};
        };
        const auto prompt_of = [](const Model& m) { return random_ids(m, 300, 21); };
        Outcome expected;
        for (const bool device : {false, true}) {
            CAPTURE(device);
            const auto backend = [&] {
                return device ? std::move(test::DeviceRanks(2).group) : make_cpu_backends(2, 2);
            };
            const test::Loaded l(checkpoint, backend());
            if (!device) {
                Engine none(*l.model, *l.backend, options(0));
                expected = run(none, prompt_of(*l.model));
                CHECK(expected.cached == 0);
            }
            const std::string folder = dir / (device ? "device" : "cpu");
            for (const bool restarted : {false, true}) {
                CAPTURE(restarted);
                Engine engine(*l.model, *l.backend, options(64 << 20));
                CHECK(engine.load_states(folder) == "");
                if (!restarted) run(engine, prompt_of(*l.model));
                const Outcome again = run(engine, prompt_of(*l.model));
                CHECK(again.cached == 256);
                CHECK(again.tokens == expected.tokens);
                CHECK(again.logits == expected.logits);
                CHECK(engine.cache_stats().bytes <= 64 << 20);
                REQUIRE(engine.save_states([] { return true; }));
            }
        }
        // The files of other layouts have other names, and a renamed one is refused.
        const test::Loaded whole(checkpoint, test::cpu());
        Engine engine(*whole.model, *whole.backend, options(64 << 20));
        CHECK(engine.load_states(dir / "cpu") == "");
        CHECK(run(engine, prompt_of(*whole.model)).cached == 0);
        REQUIRE(engine.save_states([] { return true; }));
        std::vector<std::filesystem::path> files;
        for (const auto& entry : std::filesystem::directory_iterator(dir / "cpu"))
            files.push_back(entry.path());
        REQUIRE(files.size() == 2);
        std::vector<std::string> bytes;
        for (const auto& file : files) {
            std::ifstream in(file, std::ios::binary);
            bytes.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
        }
        for (size_t i = 0; i < 2; ++i) std::ofstream(files[i], std::ios::binary) << bytes[1 - i];
        Engine other(*whole.model, *whole.backend, options(64 << 20));
        CHECK(other.load_states(dir / "cpu").find("is of another model or version") != std::string::npos);
        CHECK(run(other, prompt_of(*whole.model)).cached == 0);
    }

    TEST_CASE("ranks: one that fails ends all requests at once, and nobody waits") {
        const std::string checkpoint = rank_model().in("bf16");
        for (const size_t failing : {0u, 1u, 2u}) {
            CAPTURE(failing);
            test::DeviceRanks ranks(3 + 1);
            const auto model = load_model(checkpoint, *ranks.group, {.tokenizer = false});
            Engine engine(*model, *ranks.group, {.context = 256, .sequences = 2});
            std::vector<RequestId> ids;
            for (unsigned i = 0; i < 3; ++i) {
                Request r;
                r.prompt = random_ids(*model, 30, i);
                r.max_tokens = 100;
                ids.push_back(engine.submit(std::move(r)));
            }
            for (int i = 0; i < 4; ++i) engine.step();
            ranks.each[failing]->before_run = [] { throw Error(ErrorKind::device, "rank on fire"); };
            const auto begun = std::chrono::steady_clock::now();
            CHECK_THROWS_WITH_AS(engine.step(), "rank on fire", Error);
            CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(1));
            for (const RequestId id : ids) {
                REQUIRE(engine.finished(id));
                CHECK(engine.take(id).error == "rank on fire");
            }
        }
    }

    TEST_CASE("ranks: an error of one rank that is no device's ends its step only") {
        test::DeviceRanks ranks(2);
        const auto model = load_model(rank_model().in("bf16"), *ranks.group, {.tokenizer = false});
        Engine engine(*model, *ranks.group, {.context = 256});
        const auto prompt = random_ids(*model, 30, 1);
        const Outcome expected = run(engine, prompt);
        ranks.each[1]->before_run = [] { throw Error(ErrorKind::runtime, "once"); };
        CHECK(run(engine, prompt).error == "once");
        ranks.each[1]->before_run = nullptr;
        CHECK(run(engine, prompt).logits == expected.logits);
    }

    TEST_CASE("ranks: what cannot be shared is refused, with what to do") {
        const auto refusal = [](const std::string& checkpoint, int ranks, OpenOptions options = {}) {
            options.tokenizer = false;
            options.shard = {.rank = ranks - 1, .of = ranks};
            return error_of([&] { open_model(checkpoint, options); });
        };
        const std::string model = rank_model().in("bf16");
        CHECK(refusal(model, 4) == "");
        CHECK(refusal(model, 3).find("--tensor-parallel-size 3: this model has 4 attention heads") == 0);
        CHECK(refusal(model, 8).find("4 attention heads") != std::string::npos);
        CHECK(refusal(test::parity("base/bf16"), 2)
                  .find("the expert width of this model is 16, and 2 ranks need a multiple of 32") !=
              std::string::npos);
        CHECK(refusal(test::parity("odd_pattern/bf16"), 2).find("101 rows of the head") != std::string::npos);
    }

    TEST_CASE("ranks: two, four and eight share the published shapes, where no block of FP8 is in the way") {
        for (const std::string shape : {"qwen3.6-35b-a3b", "qwen3.6-27b-shape"})
            for (const std::string mix : {"aeon", "xs", "nvidia", "fp8-head", "qwen-fp8"})
                for (const int ranks : {2, 4, 8}) {
                    CAPTURE(shape);
                    CAPTURE(mix);
                    CAPTURE(ranks);
                    const OpenOptions options{.tokenizer = false, .shard = {.rank = ranks - 1, .of = ranks}};
                    const std::string error = error_of([&] { open_synthetic(shape, mix, options); });
                    const bool small = (mix == "qwen-fp8" && shape == "qwen3.6-35b-a3b") || mix == "fp8-head";
                    if (ranks == 8 && small)
                        CHECK(error.find("a block of 128; choose fewer") != std::string::npos);
                    else
                        CHECK(error == "");
                }
    }

    TEST_CASE("ranks: each places its own part only, as the memory plan says") {
        const std::string checkpoint = rank_model().in("nvfp4");
        const auto whole = open_model(checkpoint, {.tokenizer = false});
        test::DeviceRanks ranks(2);
        const OpenOptions options{.tokenizer = false};
        const auto model =
            open_ranks(2, options, [&](const OpenOptions& own) { return open_model(checkpoint, own); });
        const MemoryPlan plan = make_memory_plan(*model, *ranks.group, {.context = 256}, false);
        place_weights(*model, *ranks.group);
        for (const test::CountedBackend* rank : ranks.each) CHECK(rank->used == plan.weight_bytes());
        for (int rank = 0; rank < 2; ++rank) {
            const auto& own = model->of_rank(rank).weights().uses;
            REQUIRE(own.size() == whole->weights().uses.size());
            for (size_t i = 0; i < own.size(); ++i) {
                const std::string group = own[i].group;
                CAPTURE(group);
                if (group == "norms") continue;
                const bool everywhere = group == "router" || group == "embedding";
                CHECK(own[i].parameters() * (everywhere ? 1 : 2) == whole->weights().uses[i].parameters());
            }
        }
        CHECK(model->info().parameters == whole->info().parameters);
    }
}

std::unique_ptr<Backend> two_gpus(bool peer_access = true) {
    return make_cuda_backends({0, 1}, {.peer_access = peer_access});
}

TEST_SUITE("gpus") {
    TEST_CASE("gpu ranks: the logits of the CPU, but for BF16, in every format") {
        for (const bool dense : {false, true})
            for (const std::string format : {"bf16", "nvfp4", "fp8", "fp8-block", "fp8-tensor"}) {
                CAPTURE(dense);
                CAPTURE(format);
                const std::string checkpoint = rank_model(dense).in(format);
                const Outcome cpu = on_ranks(checkpoint, make_cpu_backends(2, 1));
                const auto off = [&](const Outcome& gpus) {
                    return difference(same_rows(cpu, gpus), same_rows(gpus, cpu));
                };
                const double one = off(on_ranks(checkpoint, make_cuda_backends({0}))),
                             two = off(on_ranks(checkpoint, two_gpus()));
                MESSAGE(fmt::format("from the CPU: one GPU {:.5f}, two {:.5f}", one, two));
                CHECK(two < 1.5 * one + 0.002);
            }
    }

    TEST_CASE("gpu ranks: answers alone and beside 63 others") {
        const test::Loaded l(test::source_dir() + "/models/demo", two_gpus());
        Engine engine(*l.model, *l.backend, {.context = 512, .sequences = 64});
        std::vector<std::vector<int32_t>> prompts;
        for (unsigned i = 0; i < 64; ++i) prompts.push_back(random_ids(*l.model, 1 + 5 * i, i));
        std::vector<Outcome> alone, crowd(prompts.size());
        for (const auto& prompt : prompts) alone.push_back(run(engine, prompt));
        std::vector<RequestId> ids;
        for (size_t i = 0; i < prompts.size(); ++i)
            ids.push_back(engine.submit(recorded(prompts[i], crowd[i], false)));
        while (engine.step()) {
        }
        int equal = 0;
        for (size_t i = 0; i < prompts.size(); ++i) {
            take(engine, ids[i], crowd[i]);
            equal += crowd[i].error.empty() && crowd[i].tokens == alone[i].tokens &&
                     crowd[i].logits == alone[i].logits;
        }
        MESSAGE(fmt::format("{} of {} answers equal", equal, prompts.size()));
        CHECK(equal == 64);
    }

    TEST_CASE("gpu ranks: the same bits through host memory as by peer access") {
        std::vector<Outcome> direct, through_host;
        for (const bool peer_access : {true, false}) {
            const test::Loaded l(test::source_dir() + "/models/demo", two_gpus(peer_access));
            Engine engine(*l.model, *l.backend, {.context = 512, .sequences = 64});
            std::vector<Outcome>& outcomes = peer_access ? direct : through_host;
            for (unsigned i = 0; i < 64; ++i)
                outcomes.push_back(run(engine, random_ids(*l.model, 1 + 5 * i, i)));
        }
        int equal = 0;
        for (size_t i = 0; i < direct.size(); ++i)
            equal += direct[i].tokens == through_host[i].tokens && direct[i].logits == through_host[i].logits;
        MESSAGE(fmt::format("{} of {} answers equal", equal, direct.size()));
        CHECK(equal == 64);
    }

    TEST_CASE("gpu ranks: one that fails wakes the other, and the next step works") {
        const test::Loaded l(rank_model().in("bf16"), two_gpus());
        Engine engine(*l.model, *l.backend, {.context = 256});
        const auto prompt = random_ids(*l.model, 40, 2);
        const Outcome expected = run(engine, prompt);
        const std::string error = error_of([&] {
            l.backend->on_ranks([&](int rank) {
                if (rank == 1) throw Error(ErrorKind::runtime, "no part");
                Graph g;
                Tensor* x = g.input("x", DType::F32, {1, 128});
                const NextNorm norm{g.input("norm", DType::F32, {128}), DType::BF16, StepKind::answer};
                g.output(all_reduce_add(g, "y", x, x, norm).x);
                Plan plan(std::move(g), l.backend->of_rank(0));
                const auto begun = std::chrono::steady_clock::now();
                plan.run();
                CHECK(error_of([&] { l.backend->of_rank(0).synchronize(); }).find("another rank") !=
                      std::string::npos);
                CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(1));
            });
        });
        CHECK(error == "no part");
        CHECK(run(engine, prompt).logits == expected.logits);
    }

    TEST_CASE("gpu ranks: the next step waits for kernels of the one that failed, and then works") {
        const test::Loaded l(rank_model().in("bf16"), two_gpus());
        Engine engine(*l.model, *l.backend, {.context = 256});
        const auto prompt = random_ids(*l.model, 40, 2);
        const Outcome expected = run(engine, prompt);
        std::unique_ptr<Plan> plan;
        l.backend->on_ranks([&](int rank) {
            if (rank != 0) return;
            Graph g;
            Tensor* x = g.input("x", DType::F32, {1, 128});
            const NextNorm norm{g.input("norm", DType::F32, {128}), DType::BF16, StepKind::answer};
            g.output(all_reduce_add(g, "y", x, x, norm).x);
            plan = std::make_unique<Plan>(std::move(g), l.backend->of_rank(0));
        });
        const auto begun = std::chrono::steady_clock::now();
        const std::string error = error_of([&] {
            l.backend->on_ranks([&](int rank) {
                if (rank == 1) throw Error(ErrorKind::runtime, "no part");
                plan->run();
            });
        });
        CHECK(error == "no part");
        CHECK(run(engine, prompt).logits == expected.logits);
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5));
    }
}

}  // namespace
}  // namespace quern
