#include "tools/common/doctor/doctor.h"

#include <chrono>

#include <fmt/format.h>

#include "ggml-like/backend.h"
#include "ggml-like/error.h"
#include "tools/common/doctor/expert_load.h"

namespace quern {
namespace {

struct Check {
    const char* name;
    void (*run)(Examination& e, CheckReport& report);
};

/// In this order: the surest and the cheapest first.
constexpr Check kChecks[] = {
    {"known answers", check_known_answers},
    {"known numbers", check_known_numbers},
    {"texts", check_texts},
    {"entropy", check_entropy},
    {"experts", check_experts},
    {"activations", check_activations},
    {"repetition", check_repetition},
    {"turns", check_turn},
    {"tool call", check_tool_call},
    {"same answer", check_same_answer},
    {"card", check_card},
    {"needle", check_recall},
    {"CPU against GPU", check_against_cpu},  // waits for the CPU, which began with the first check
};

CheckReport run_check(const Check& check, Examination& e) {
    CheckReport report{.name = check.name};
    const double begin = e.seconds();
    if (e.seconds_left() <= 0) {
        report.add(Verdict::skipped, "no time left");
        return report;
    }
    try {
        check.run(e, report);
    } catch (const TimeOver&) {
        report.add(Verdict::skipped, "the time was over before the answer");
    } catch (const Error& error) {
        if (error.kind() == ErrorKind::device) throw;
        if (error.kind() == ErrorKind::too_long) {  // serve -c 512
            report.add(Verdict::skipped, fmt::format("the context is too small for it: {}", error.what()));
            return report;
        }
        const bool memory = error.kind() == ErrorKind::memory;
        report.add(memory ? Verdict::note : Verdict::wrong, fmt::format("it could not run: {}", error.what()),
                   memory ? "a smaller context leaves room for it" : "");
    }
    report.seconds = e.seconds() - begin;
    return report;
}

}  // namespace

Diagnosis examine(Engine& engine, const DoctorOptions& options) {
    Examination e(engine, options);
    const ModelInfo& info = engine.model().info();
    Diagnosis d{.model = fmt::format("{} ({}, {})", info.name, info.architecture, info.formats),
                .kind = e.known() != nullptr ? e.known()->name : "",
                .backend = fmt::format("{}, {}", engine.backend().name(), engine.backend().description())};
    for (const Check& check : kChecks) d.checks.push_back(run_check(check, e));
    if (e.traced() != nullptr) d.expert_tokens = expert_load(*e.traced(), info.experts).tokens;
    d.seconds = e.seconds();
    return d;
}

}  // namespace quern
