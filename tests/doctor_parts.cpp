// The parts of the doctor, each without a checkpoint or with a tiny one.
#include <doctest/doctest.h>

#include <cmath>

#include "checkpoint_writer.h"
#include "engine_harness.h"
#include "models/tokenizer.h"
#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/expert_load.h"
#include "tools/common/doctor/judgements.h"
#include "tools/common/doctor/measures.h"
#include "tools/common/doctor/texts.h"

using namespace quern;
using namespace quern::test;

namespace {

std::string all_of(const CheckReport& report) {
    std::string text;
    for (const CheckFinding& f : report.findings)
        text += std::string(verdict_name(f.verdict)) + " " + f.text +
                (f.advice.empty() ? "" : " -> " + f.advice) + "\n";
    return text;
}

CheckReport judged(const CardState& state) {
    CheckReport report{.name = "card"};
    judge_card(state, report);
    return report;
}

CardState sound_card() {
    return {.name = "card",
            .ecc_corrected = 0,
            .ecc_uncorrected = 0,
            .sm_clock = 1900,
            .max_sm_clock = 1980,
            .memory_clock = 3201,
            .max_memory_clock = 3201,
            .bus_bits = 6144,
            .pcie_width = 16,
            .max_pcie_width = 16,
            .pcie_generation = 5,
            .max_pcie_generation = 5,
            .celsius = 50,
            .slowdowns = 0x04};
}

ModelTrace trace_of(std::vector<std::vector<float>> layers, int64_t tokens) {
    ModelTrace t{.tokens = tokens};
    for (auto& residual : layers) t.layers.push_back({.residual = std::move(residual)});
    return t;
}

const std::string kTiny = QUERN_SOURCE_DIR "/tests/vectors/parity/base/ct";

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("doctor: loops at the end of an answer") {
        using Tokens = std::vector<int32_t>;
        CHECK(loop_at_end(Tokens{}) == 0);
        CHECK(loop_at_end(Tokens(12, 7)) == 1);
        CHECK(loop_at_end(Tokens(7, 7)) == 0);  // too short to tell
        Tokens counted, looped{90, 91, 92}, twice;
        for (int32_t i = 0; i < 40; ++i) counted.push_back(i);
        for (int32_t i = 0; i < 30; ++i) looped.push_back(i % 5);
        for (int32_t i = 0; i < 20; ++i) twice.push_back(i % 10);
        CHECK(loop_at_end(counted) == 0);
        CHECK(loop_at_end(looped) == 5);
        CHECK(loop_at_end(twice) == 0);
        looped.push_back(99);
        CHECK(loop_at_end(looped) == 0);
    }

    TEST_CASE("doctor: surprise and entropy of logits") {
        const std::vector<float> even(8, 3.0f), sure{20, 0, 0, 0};
        CHECK(surprise(even, 5) == doctest::Approx(std::log(8.0)));
        CHECK(entropy(even) == doctest::Approx(std::log(8.0)));
        CHECK(surprise(sure, 0) == doctest::Approx(3 * std::exp(-20.0)).epsilon(0.01));
        CHECK(surprise(sure, 1) == doctest::Approx(20).epsilon(0.01));
        CHECK(entropy(sure) < 1e-6);
        std::vector<float> broken = even;
        broken[3] = NAN;
        CHECK(std::isinf(surprise(broken, 5)));
        CHECK(!std::isfinite(entropy(broken)));
    }

    TEST_CASE("doctor: the load of experts") {
        ModelTrace trace{.tokens = 4};
        trace.layers.resize(2);
        trace.layers[0].experts = {0, 1, 2, 3, 0, 1, 2, 3};
        trace.layers[1].experts = {0, 0, 0, 0, 0, 0, 0, 0};
        const ExpertLoad load = expert_load(trace, 6);
        REQUIRE(load.tokens.size() == 2);
        CHECK(load.tokens[0] == std::vector<int64_t>{2, 2, 2, 2, 0, 0});
        CHECK(load.dead(0) == 2);
        CHECK(load.dead(1) == 5);
        CHECK(load.spread(0) == doctest::Approx(4));
        CHECK(load.spread(1) == doctest::Approx(1));
    }

    TEST_CASE("doctor: layers that do not route, dead and overloaded experts") {
        const auto judge = [](std::vector<int64_t> counts, int64_t tokens, int64_t used) {
            CheckReport report;
            judge_experts(
                {{std::vector<int64_t>(counts.size(), tokens * used / static_cast<int64_t>(counts.size())),
                  counts}},
                tokens, used, report);
            return all_of(report);
        };
        CHECK(contains(judge({60, 50, 50, 40, 50, 50, 50, 50}, 200, 2), "ok 200 tokens"));
        CHECK(contains(judge({200, 200, 0, 0, 0, 0, 0, 0}, 200, 2),
                       "wrong layer 1 sends its tokens to 2.0 experts"));
        CHECK(
            contains(judge({134, 133, 133, 0, 0, 0, 0, 0}, 200, 2), "note 200 tokens of all kinds: 5 of 16"));
        CHECK(contains(judge({3, 3, 3, 3, 0, 0, 0, 0}, 6, 2), "ok 6 tokens"));  // too few to tell
        CHECK(contains(judge({100, 100}, 100, 2), "ok 100 tokens"));            // every token takes all
        std::vector<int64_t> one(64, 7);
        one[5] = 150;
        CHECK(contains(judge(one, 200, 3), "note 200 tokens"));
        CHECK(contains(judge(one, 200, 3), "the busiest takes 75 %"));
    }

    TEST_CASE("doctor: activations that overflow are named with their first layer") {
        const auto judge = [](float second, int64_t not_finite) {
            ModelTrace trace{.tokens = 1, .activation = DType::BF16};
            for (const float largest : {3.0f, second, 5.0f})
                trace.layers.push_back({.residual = {1, 1}, .largest = largest, .largest_in = "node"});
            trace.layers[1].not_finite = not_finite;
            CheckReport report;
            judge_activations(trace, report);
            CHECK(report.numbers["largest"].size() == 3);
            return all_of(report);
        };
        CHECK(contains(judge(4, 0), "ok the largest is 5, in node; BF16 ends"));
        CHECK(contains(judge(7e4f, 0), "note the largest is 7e+04"));
        CHECK(contains(judge(1e20f, 0), "wrong layer 1: node reaches 1e+20"));
        CHECK(contains(judge(4, 7), "wrong layer 1: 7 activations are NaN"));
    }

    TEST_CASE("doctor: entropy that is too high, too low, or none") {
        const auto judge = [](double mean) {
            CheckReport report;
            judge_entropy(mean, 8, report);
            return report.verdict();
        };
        CHECK(judge(2) == Verdict::ok);
        CHECK(judge(7.9) == Verdict::wrong);
        CHECK(judge(0.001) == Verdict::wrong);
        CHECK(judge(NAN) == Verdict::wrong);
    }

    TEST_CASE("doctor: two traces, layer by layer") {
        const ModelTrace a = trace_of({{1, 0, 0, 2, 3, 0}, {1, 1, 1, 1, 1, 1}}, 3);
        CHECK(median_differences(a, a) == std::vector<double>{0, 0});
        const ModelTrace b = trace_of({{1, 0, 0, 2, 3, 0}, {1.1f, 1.1f, 1.1f, 1.1f, 9, 9}}, 3);
        const std::vector<double> m = median_differences(b, a);
        CHECK(m[0] == 0);
        CHECK(m[1] == doctest::Approx(0.1).epsilon(1e-4));  // one token that is far off is no median
        const ModelTrace bad = trace_of({{1, 0, NAN, 2, NAN, 0}, {1, 1, 1, 1, 1, 1}}, 3);
        CHECK(std::isinf(median_differences(bad, a)[0]));
    }

    TEST_CASE("doctor: what a card's state means") {
        CHECK(judged(sound_card()).verdict() == Verdict::ok);
        CHECK(sound_card().memory_speed() == doctest::Approx(4.917e12).epsilon(0.001));
        CHECK(CardState{}.memory_speed() == 0);
        CardState s = sound_card();
        s.ecc_uncorrected = 2;
        CHECK(judged(s).verdict() == Verdict::wrong);
        CHECK(contains(all_of(judged(s)), "2 uncorrected"));
        s = sound_card();
        s.slowdowns = 0x28;
        CHECK(judged(s).verdict() == Verdict::note);
        CHECK(contains(all_of(judged(s)), "hardware slowdown, thermal slowdown"));
        s = sound_card();
        s.pcie_width = 4;
        CHECK(contains(all_of(judged(s)), "note PCIe lanes 4 of 16"));
        s = sound_card();
        s.ecc_uncorrected.reset();
        CHECK(judged(s).verdict() == Verdict::note);
        const auto copy = [](double speed, double possible) {
            CheckReport report;
            judge_copy_speed(speed, possible, report);
            return report.verdict();
        };
        CHECK(copy(4.2e12, 4.9e12) == Verdict::ok);
        CHECK(copy(3e12, 4.9e12) == Verdict::note);
        CHECK(copy(1e12, 4.9e12) == Verdict::wrong);
        CHECK(copy(1e12, 0) == Verdict::ok);
    }

    TEST_CASE("doctor: no driver library is no error") {
        const CardAnswer answer = ask_card("00000000:1B:00.0", "libquern-not-there.so.9");
        CHECK(!answer.state);
        CHECK(contains(answer.problem, "libquern-not-there.so.9 is not there"));
        CHECK(contains(ask_card("00000000:1B:00.0", "libm.so.6").problem, "cannot be initialized"));
    }

    TEST_CASE("doctor: known models") {
        REQUIRE(known_models().size() >= 3);
        for (const KnownModel& k : known_models()) {
            CAPTURE(k.name);
            CHECK(!k.answers.empty());
            for (const KnownAnswer& a : k.likeliest) CHECK(a.prompt.size() == a.answer.size());
            for (const DoctorText& t : doctor_texts())
                CHECK(k.nats.count(t.kind) + k.bits_per_byte.count(t.kind) == 1);
            if (k.numbers) {
                CHECK(k.numbers->log_probability.size() + 1 == k.numbers->prompt.size());
                CHECK(k.numbers->residual_rms.size() == static_cast<size_t>(k.layers));
            }
        }
        CHECK(doctor_texts().size() >= 15);
        const auto error = [](const std::string& json) {
            try {
                parse_known_models(json);
            } catch (const Error& e) {
                return std::string(e.what());
            }
            return std::string("no error");
        };
        CHECK(contains(error(R"({"models": [{"name": "x"}]})"), "entry 1"));
        CHECK(contains(error("{"), "known models"));
    }

    TEST_CASE("doctor: the report as a page, as JSON, as HTML") {
        Diagnosis d{.model = "m<1>", .kind = "k", .backend = "CPU"};
        d.checks.push_back({.name = "first"});
        d.checks.back().add(Verdict::ok, "all is well");
        d.checks.push_back({.name = "second"});
        d.checks.back().add(Verdict::skipped, "no time");
        CHECK(d.exit_code() == 0);
        CHECK(contains(describe(d), "\nsound: 1 ok, 0 notes, 1 skipped"));
        CHECK(to_json(d)["verdict"] == "ok");
        d.checks.back().add(Verdict::note, "look");
        CHECK(d.exit_code() == 0);
        d.checks.front().add(Verdict::wrong, "not < well", "do this");
        CHECK(d.exit_code() == 3);
        const std::string page = describe(d);
        CHECK(contains(page, "NOT SOUND: 1 wrong, 1 ok, 1 note, 1 skipped"));
        CHECK(contains(page, "wrong"));
        CHECK(contains(page, "-> do this"));
        const auto json = to_json(d);
        CHECK(json["verdict"] == "wrong");
        CHECK(json["checks"][0]["findings"][1]["advice"] == "do this");
        d.expert_tokens = {{3, 0, 1}, {0, 0, 9}};
        const std::string html = to_html(d);
        CHECK(contains(html, "m&#60;1&#62;"));
        CHECK(contains(html, "not &#60; well"));
        CHECK(contains(html, "layer 1, expert 2: 9 tokens, 3.00 times the average"));
        CHECK(contains(html, "fill=\"#fff\""));
        CHECK(!contains(html, "http"));  // needs nothing else
    }

    TEST_CASE(
        "trace: the residual stream of a prompt is that of its beginning, and experts are those in use") {
        Loaded l(kTiny, make_cpu_backend(2));
        const ModelInfo& info = l.model->info();
        std::vector<int32_t> ids;
        for (int32_t i = 0; i < 70; ++i) ids.push_back(i * 7 % static_cast<int32_t>(info.vocab));
        const ModelTrace all = trace_prompt(*l.model, *l.backend, ids, true);
        const ModelTrace part = trace_prompt(*l.model, *l.backend, std::span(ids).first(9));
        REQUIRE(all.layers.size() == static_cast<size_t>(info.layers));
        CHECK(part.logits.empty());
        const auto width = static_cast<size_t>(info.width);
        CHECK(all.embedding.size() == 70 * width);
        for (size_t layer = 0; layer < all.layers.size(); ++layer) {
            const LayerTrace &a = all.layers[layer], &b = part.layers[layer];
            REQUIRE(a.residual.size() == 70 * width);
            CHECK(std::equal(b.residual.begin(), b.residual.end(), a.residual.begin()));
            CHECK(a.experts.size() == static_cast<size_t>(70 * info.experts_used));
            CHECK(std::equal(b.experts.begin(), b.experts.end(), a.experts.begin()));
            for (const int32_t id : a.experts) CHECK(id < info.experts);
            CHECK(a.largest > 0);
            CHECK(a.not_finite == 0);
            CHECK(all.rms(layer) > 0);
        }
        Stepper stepper(l);  // the engine's graph gives the same logits
        SequenceState s = stepper.pool.acquire();
        const std::vector<float> last = stepper.run(s, ids);
        REQUIRE(all.logits.size() == 70 * last.size());
        CHECK(std::equal(last.begin(), last.end(),
                         all.logits.end() - static_cast<std::ptrdiff_t>(last.size())));
        CHECK_THROWS_AS(trace_prompt(*l.model, *l.backend, {}), Error);
    }
}
