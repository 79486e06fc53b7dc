// What bench says beside the speed: bytes of a token, and whether the GPU was fit for measurements.
#include <doctest/doctest.h>

#include <cmath>
#include <set>

#include "checkpoint_writer.h"
#include "ggml-like/error.h"
#include "models/tokenizer.h"
#include "models/weight_placement.h"
#include "tools/bench/gpu_state.h"
#include "tools/bench/measure.h"
#include "tools/bench/quality.h"
#include "tools/bench/roofline.h"
#include "tools/common/loading.h"
#include "tools/engine/memory_plan.h"

namespace quern {
namespace {

double part(const TokenBytes& bytes, const std::string& name) {
    for (const auto& [part_name, value] : bytes)
        if (part_name == name) return value;
    return -1;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("what nvidia-smi says of a GPU") {
        CHECK(taint_of("0x0000000000000000\n", "4711\n").empty());
        CHECK(taint_of("0x0000000000000001\n", "").empty());  // idle
        CHECK(taint_of("0x0000000000000004\n", "") == "power cap");
        CHECK(taint_of("0x0000000000000068\n", "1\n2\n3\n") ==
              "hardware slowdown, thermal slowdown, hardware thermal slowdown, 3 processes");
        CHECK(taint_of("[N/A]\n", "") == "unknown");
        CHECK(taint_of("", "") == "unknown");
        CHECK(gpu_taint("") == "unknown");
        CHECK(gpu_taint("$(reboot)") == "unknown");
    }

    TEST_CASE("bytes of a token: every weight once a step, experts as far as they are chosen") {
        const auto cpu = make_cpu_backend(2);
        const auto model = load_model(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/ct", *cpu,
                                      {.tokenizer = false});
        Engine engine(*model, *cpu, {.context = 64});
        const MemoryPlan& plan = engine.memory_plan();
        const TokenBytes one = token_bytes(*model, plan, 1, 10), four = token_bytes(*model, plan, 4, 10);
        CHECK(part(one, "KV cache") == 10.0 * static_cast<double>(plan.token_bytes));
        CHECK(part(one, "recurrent state") == 2.0 * static_cast<double>(plan.slot_bytes));  // no journal
        CHECK(part(four, "head") == doctest::Approx(part(one, "head") / 4));
        CHECK(part(four, "routed experts") < part(one, "routed experts"));
        CHECK(part(four, "routed experts") > part(one, "routed experts") / 4);
        const double weights = total(one) - part(one, "KV cache") - part(one, "recurrent state");
        CHECK(weights == doctest::Approx(static_cast<double>(model->info().token_bytes)).epsilon(1e-6));
        CHECK(token_flops(*model) > 0);
        CHECK(token_flops(*model) < 2.0 * static_cast<double>(model->info().parameters));
    }

    TEST_CASE("drafts of a given acceptance: the same answers, and as many tokens a round as they promise") {
        const auto cpu = make_cpu_backend(2);
        const auto model = load_model(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/ct", *cpu,
                                      {.tokenizer = false});
        const auto drafter = std::make_shared<ReplayDrafter>(std::vector<double>{0.8, 0.5, 0.3});
        Engine engine(*model, *cpu,
                      {.context = 512,
                       .sequences = 3,
                       .speculation = {.kind = DrafterKind::automatic, .draft_max = 3},
                       .drafter = drafter});
        for (const int64_t parallel : {1, 3}) {
            BenchTest test{.answer = 300, .parallel = parallel, .drafts = {.kind = DrafterKind::none}};
            const Samples plain = run_test(engine, test, 1);
            CHECK(plain.drafted == 0);
            CHECK(plain.plain_rate == 0);
            test.drafts = {.most = 3, .full = true};
            CHECK(test.name() == (parallel > 1 ? "tg300 x3 n=3" : "tg300 n=3"));
            const Samples drafted = run_test(engine, test, 1, drafter.get());
            CHECK(drafted.output_hash == plain.output_hash);
            CHECK(drafted.plain_rate > 0);
            CHECK(drafted.round_tokens() == doctest::Approx(1 + 0.8 + 0.5 + 0.3).epsilon(0.1));
            test.drafts = {.most = 1, .full = true};
            CHECK(run_test(engine, test, 1, drafter.get()).round_tokens() ==
                  doctest::Approx(1.8).epsilon(0.1));
        }
    }

    TEST_CASE(
        "drafts after a depth: the context has room for the same answers without them, which follow each "
        "other") {
        const auto cpu = make_cpu_backend(2);
        const auto model = open_synthetic("tiny", "aeon", {.tokenizer = false});
        place_weights(*model, *cpu);
        const auto drafter = std::make_shared<ReplayDrafter>(std::vector<double>{0.8, 0.5});
        for (const int64_t parallel : {1, 2}) {
            const BenchTest test{
                .answer = 40, .depth = 70, .parallel = parallel, .drafts = {.most = 2, .full = true}};
            Engine engine(*model, *cpu,
                          {.context = test.context(64, 3),
                           .sequences = parallel,
                           .step_tokens = 64,
                           .speculation = {.kind = DrafterKind::automatic, .draft_max = 2},
                           .drafter = drafter});
            const Samples samples = run_test(engine, test, 3, drafter.get());
            CHECK(samples.plain_rate > 0);
            CHECK(samples.drafted > 0);
            CHECK(samples.answered >= parallel * (1 + 3) * 40);  // they follow each other, too
            CHECK(samples.seconds.size() == 3);
            CHECK(samples.output_hash == run_test(engine, test.plain(), 1).output_hash);
        }
    }

    TEST_CASE("node by node: only steps of the kind that a test measures") {
        const auto cpu = make_cpu_backend(2);
        const auto model = open_synthetic("tiny", "aeon", {.tokenizer = false});
        place_weights(*model, *cpu);
        Engine engine(*model, *cpu, {.context = 256, .sequences = 3});
        const auto steps = [&](const BenchTest& test) {
            const std::string text = op_table(engine, test), before = "node by node, ";
            return std::stoi(text.substr(text.find(before) + before.size()));
        };
        CHECK(steps({.answer = 5}) == 5);
        CHECK(steps({.answer = 5, .parallel = 3}) == 5);
        CHECK(steps({.prompt = 100}) == 1);
        CHECK(steps({.prompt = 100, .answer = 5}) == 1 + 4);  // the prompt's step gives the first token
    }

    TEST_CASE("many sequences at depth: only steps after which all answer count, however prompts are cut") {
        const auto cpu = make_cpu_backend(2);
        const auto model = open_synthetic("tiny", "aeon", {.tokenizer = false});
        place_weights(*model, *cpu);
        const BenchTest test{.answer = 5, .depth = 300, .parallel = 4};
        std::set<std::string> answers;
        for (const int64_t rows : {64, 512}) {
            Engine engine(*model, *cpu,
                          {.context = test.context(64, 2), .sequences = test.parallel, .step_tokens = rows});
            CHECK(op_table(engine, test).find("node by node, 5 steps") != std::string::npos);
            const Samples samples = run_test(engine, test, 2);
            CHECK(samples.tokens == 4 * 5);
            answers.insert(samples.output_hash);
        }
        CHECK(answers.size() == 1);
        Engine small(*model, *cpu, {.context = 303, .sequences = test.parallel, .step_tokens = 64});
        CHECK_THROWS_AS(run_test(small, test, 1), Error);  // early ones have no room to wait for others
    }

    TEST_CASE("prompts of many sequences: all of their tokens count") {
        const auto cpu = make_cpu_backend(2);
        const auto model = open_synthetic("tiny", "aeon", {.tokenizer = false});
        place_weights(*model, *cpu);
        const BenchTest test{.prompt = 200, .parallel = 3};
        CHECK(test.name() == "pp200 x3");
        Engine engine(*model, *cpu, {.context = test.context(128, 2), .sequences = 3});
        const Samples samples = run_test(engine, test, 2);
        CHECK(samples.tokens == 600);
        CHECK(samples.seconds.size() == 2);
    }

    TEST_CASE("-ngl: 0, auto, all, and as many layers as the model has") {
        CHECK(parse_gpu_layers("0") == GpuOptions::none);
        CHECK(parse_gpu_layers("auto") == GpuOptions::automatic);
        CHECK(parse_gpu_layers("all") == GpuOptions::all);
        CHECK_NOTHROW(check_layers(parse_gpu_layers("99"), 40));
        CHECK_NOTHROW(check_layers(parse_gpu_layers("40"), 40));
        CHECK_NOTHROW(check_layers(GpuOptions::all, 40));
        CHECK_THROWS_AS(check_layers(parse_gpu_layers("39"), 40), Error);
        CHECK_THROWS_AS(parse_gpu_layers("-1"), Error);
        CHECK_THROWS_AS(parse_gpu_layers("most"), Error);
        CHECK(make_backend(GpuOptions::none, 1)->name() == "CPU");
    }
}

TEST_SUITE("model") {
    TEST_CASE("quality: right answers are counted, and a wrong one costs more nats than the right one") {
        const test::TempDir dir;
        const auto question = [](const std::string& expect) {
            return R"({"task": "t", "messages": [{"role": "user", "content": "What is the capital of France?"}], "expect": ")" +
                   expect + "\"}\n";
        };
        const std::string right = "The capital of France is Paris.",
                          wrong = "The capital of France is Berlin.";
        const auto backend = make_cpu_backend(2);
        const auto model = load_model(std::string(QUERN_SOURCE_DIR) + "/models/demo", *backend, {});
        Engine engine(*model, *backend, {.context = 512, .sequences = 2});
        const auto measure = [&](const std::string& lines) {
            return measure_quality(engine, read_questions(dir.write("q.jsonl", lines)), 64);
        };
        const QualityReport good = measure(question(right)), bad = measure(question(wrong)),
                            both = measure(question(right) + "\n" + question(wrong));
        CHECK(good.all().right == 1);
        CHECK(good.nats_per_token() > 0);
        CHECK(good.nats_per_token() < 0.05);  // it is what the model says itself
        CHECK(bad.all().right == 0);
        CHECK(bad.nats_per_token() > 0.3);
        CHECK(both.tasks.at("t").questions == 2);
        CHECK(both.tasks.at("t").right == 1);
        CHECK(both.nats == doctest::Approx(good.nats + bad.nats).epsilon(1e-9));
        CHECK(both.tokens == good.tokens + bad.tokens);

        // The expected tokens are the greedy ones, so their logits say how sure the model was of each.
        double nats = 0;
        Request request;
        request.prompt = encode_prompt(
            model->chat().render(
                std::vector<Message>{{.role = "user", .content = "What is the capital of France?"}}, {},
                {.thinking = false}),
            *model->tokenizer());
        request.sampling.temperature = 0;
        request.max_tokens = good.tokens;
        request.on_logits = [&](int32_t id, std::span<const float> logits) {
            double sum = 0;
            for (const float l : logits)
                sum +=
                    std::exp(static_cast<double>(l) - static_cast<double>(logits[static_cast<size_t>(id)]));
            nats += std::log(sum);
        };
        engine.run(std::move(request));
        CHECK(good.nats == doctest::Approx(nats).epsilon(1e-3));
    }

    TEST_CASE("quality: a wrong file is named with its line") {
        const test::TempDir dir;
        const auto error = [&](const std::string& text) {
            try {
                read_questions(dir.write("q.jsonl", text));
            } catch (const Error& e) {
                return std::string(e.kind() == ErrorKind::usage ? e.what() : "wrong kind");
            }
            return std::string("no error");
        };
        CHECK(test::contains(error(""), "no questions"));
        CHECK(test::contains(error("\n{\"messages\": []"), "line 2"));
        CHECK(test::contains(error("{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}"), "expect"));
        CHECK_THROWS_AS(read_questions(dir / "none.jsonl"), Error);
        for (const char* text : {"A text for people.\n", "[1]\n", "\"x\"\n", "{\"messages\": [\n"}) {
            const std::string says = error(std::string("\n") + text);
            CAPTURE(says);
            CHECK(test::contains(says, "q.jsonl: line 2: expected a JSON object like {\"messages\""));
            CHECK(test::contains(says, "found '" + std::string(text, 2)));
            CHECK(test::contains(says, "--kl"));
            CHECK(!test::contains(says, "json.exception"));
        }
        CHECK(
            test::contains(error("{\"messages\": 3, \"expect\": \"\"}"), "messages must be a list, found 3"));
        CHECK(test::contains(error("{\"expect\": \"\"}"), "messages is missing"));
    }
}

}  // namespace quern
