// The doctor on several devices: it sees in ranks and stages what it sees on one device, and looks at every card.
#include <doctest/doctest.h>

#include <cmath>

#include "rank_models.h"
#include "stage_models.h"
#include "tools/common/doctor/doctor.h"
#include "tools/common/doctor/judgements.h"
#include "tools/engine/model_trace.h"

namespace quern {
namespace {

using Shares = std::vector<double>;

struct Patient {
    explicit Patient(std::unique_ptr<Backend> on, const Shares& shares = {})
        : backend(std::move(on)),
          model(load_model(test::source_dir() + "/models/demo", *backend, {.tokenizer = true}, {}, shares)),
          engine(*model, *backend, {.context = 2048, .sequences = 4}) {}
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
    Engine engine;
};

ModelTrace trace_of(const std::string& checkpoint, std::unique_ptr<Backend> backend, const Shares& shares) {
    const auto model = load_model(checkpoint, *backend, {.tokenizer = false}, {}, shares);
    return trace_prompt(*model, *backend, test::random_ids(*model, 70, 3), true);
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

/// Of a model that is traced on one device and on several.
void check_near(const ModelTrace& found, const ModelTrace& one, double tolerance) {
    const auto near = [&](const std::vector<float>& a, const std::vector<float>& b) {
        return tolerance == 0 ? a == b : difference(a, b) < tolerance;
    };
    CHECK(found.tokens == one.tokens);
    CHECK(found.embedding == one.embedding);
    CHECK(near(found.logits, one.logits));
    REQUIRE(found.layers.size() == one.layers.size());
    for (size_t l = 0; l < one.layers.size(); ++l) {
        CAPTURE(l);
        const LayerTrace &a = found.layers[l], &b = one.layers[l];
        CHECK(near(a.residual, b.residual));
        CHECK(a.experts == b.experts);
        CHECK(std::fabs(a.largest - b.largest) <= tolerance * b.largest);
        CHECK(a.largest_in.starts_with(b.largest_in));
        CHECK(a.not_finite == 0);
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("split doctor: a prompt leaves in stages what it leaves on one device, and nearly in ranks") {
        for (const char* name : {"deep/bf16", "tied_text/bf16", "dense/bf16"}) {
            CAPTURE(std::string(name));
            const ModelTrace one = trace_of(test::parity(name), test::cpu(), {});
            CHECK(!one.logits.empty());
            check_near(trace_of(test::parity(name), make_cpu_stages(2, 2), {1, 1}), one, 0);
        }
        for (const bool dense : {false, true})
            for (const char* format : {"bf16", "nvfp4"}) {
                CAPTURE(dense);
                CAPTURE(std::string(format));
                const std::string checkpoint = test::rank_model(dense).in(format);
                const ModelTrace one = trace_of(checkpoint, test::cpu(), {});
                for (const int ranks : {2, 4})
                    check_near(trace_of(checkpoint, make_cpu_backends(2, ranks), {}), one, 1e-5);
                check_near(trace_of(checkpoint, std::move(test::DeviceRanks(2).group), {}), one, 1e-5);
            }
    }

    TEST_CASE("split doctor: the demo is as sound on stages and ranks as on one device" *
              doctest::test_suite("slow")) {
        const auto diagnosis = [](std::unique_ptr<Backend> backend, const Shares& shares) {
            Patient patient(std::move(backend), shares);
            return examine(patient.engine, {.seconds = 600});
        };
        const Diagnosis one = diagnosis(test::cpu(), {});
        CHECK(one.count(Verdict::wrong) == 0);
        const Diagnosis stages = diagnosis(make_cpu_stages(2, 3), {1, 2, 1});
        const Diagnosis ranks = diagnosis(make_cpu_backends(2, 2), {});
        for (size_t i = 0; i < one.checks.size(); ++i) {
            const CheckReport& check = one.checks[i];
            CAPTURE(check.name);
            CHECK(ranks.checks[i].verdict() == check.verdict());
            CHECK(stages.checks[i].verdict() == check.verdict());
            REQUIRE(stages.checks[i].findings.size() == check.findings.size());
            if (check.name == "experts" || check.name == "activations" || check.name == "entropy")
                CHECK(stages.checks[i].numbers == check.numbers);
        }
    }

    TEST_CASE("split doctor: every card is looked at" * doctest::test_suite("slow")) {
        Patient patient(std::move(test::DeviceStages(std::vector<int64_t>(2, int64_t{1} << 30)).group),
                        {1, 1});
        const Diagnosis d = examine(patient.engine, {.seconds = 600});
        const auto card = std::find_if(d.checks.begin(), d.checks.end(),
                                       [](const CheckReport& c) { return c.name == "card"; });
        REQUIRE(card != d.checks.end());
        REQUIRE(card->numbers["cards"].size() == 2);
        for (const char* which : {"GPU 1 of 2: ", "GPU 2 of 2: "})
            CHECK(std::any_of(card->findings.begin(), card->findings.end(),
                              [&](const CheckFinding& f) { return f.text.starts_with(which); }));
        CheckReport all, second;
        second.add(Verdict::wrong, "memory errors: 3", "replace it");
        add_card(2, 4, second, all);
        CHECK(all.verdict() == Verdict::wrong);
        CHECK(all.findings[0].text == "GPU 2 of 4: memory errors: 3");
        CHECK(all.findings[0].advice == "replace it");
    }
}

}  // namespace
}  // namespace quern
