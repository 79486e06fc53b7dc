// The card, or each of several: errors of its memory, clocks, its place on the bus, and how fast it copies.
#include <algorithm>

#include <fmt/format.h>

#include "ggml-like/backend.h"
#include "tools/common/copy_speed.h"
#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/judgements.h"

namespace quern {
namespace {

/// Shares of what the memory's clock and width allow. A copy by the driver reaches 0.85 to 0.95 of it.
constexpr double kSlowCopy = 0.7, kBrokenCopy = 0.3;

/// Reasons that mean trouble. A power cap under load is usual.
constexpr uint64_t kTrouble = kHardwareSlowdown | kThermalSlowdown | kHardwareThermalSlowdown | kPowerBrake;

std::string shown(const std::optional<unsigned>& now, const std::optional<unsigned>& most) {
    const auto text = [](const std::optional<unsigned>& v) { return v ? std::to_string(*v) : "?"; };
    return fmt::format("{} of {}", text(now), text(most));
}

void judge_memory(const CardState& s, CheckReport& report) {
    if (!s.ecc_uncorrected)
        return report.add(Verdict::note, "the card counts no memory errors: ECC is off or not there",
                          "compare answers with another card's if they look strange");
    const uint64_t corrected = s.ecc_corrected.value_or(0);
    report.numbers["ecc_uncorrected"] = *s.ecc_uncorrected;
    report.numbers["ecc_corrected"] = corrected;
    const std::string text =
        fmt::format("memory errors: {} uncorrected, {} corrected", *s.ecc_uncorrected, corrected);
    if (*s.ecc_uncorrected > 0)
        return report.add(Verdict::wrong, text,
                          "weights may be damaged: reset the card and load again; if it "
                          "comes back, replace it");
    report.add(Verdict::ok, text);
}

void judge_clocks(const CardState& s, CheckReport& report) {
    const std::string slow = clock_reasons(s.slowdowns.value_or(0) & kTrouble);
    report.numbers["slowdown"] = slow;
    const std::string text = fmt::format(
        "clocks {} MHz, memory {} MHz{}{}", shown(s.sm_clock, s.max_sm_clock),
        shown(s.memory_clock, s.max_memory_clock), s.celsius ? fmt::format(", {} degrees", *s.celsius) : "",
        slow.empty() ? "" : "; " + slow);
    report.add(slow.empty() ? Verdict::ok : Verdict::note, text,
               slow.empty() ? "" : "answers stay right but come late: look at cooling and power");
}

void judge_bus(const CardState& s, CheckReport& report) {
    if (!s.pcie_width || !s.max_pcie_width) return;
    const bool narrow = *s.pcie_width < *s.max_pcie_width;
    report.numbers["pcie_width"] = *s.pcie_width;
    report.add(narrow ? Verdict::note : Verdict::ok,
               fmt::format("PCIe lanes {}, generation {}", shown(s.pcie_width, s.max_pcie_width),
                           shown(s.pcie_generation, s.max_pcie_generation)),
               narrow ? "loading is slower than it could be: another slot, or the riser" : "");
}

}  // namespace

void judge_card(const CardState& state, CheckReport& report) {
    report.numbers["name"] = state.name;
    judge_memory(state, report);
    judge_clocks(state, report);
    judge_bus(state, report);
}

void judge_copy_speed(double speed, double possible, CheckReport& report) {
    report.numbers["copy_bytes_per_second"] = speed;
    report.numbers["possible"] = possible;
    if (possible <= 0) return report.add(Verdict::ok, fmt::format("it copies {:.0f} GB/s", speed / 1e9));
    const double share = speed / possible;
    const Verdict verdict = share < kBrokenCopy ? Verdict::wrong
                            : share < kSlowCopy ? Verdict::note
                                                : Verdict::ok;
    report.add(
        verdict,
        fmt::format("it copies {:.0f} GB/s, {:.0f} % of the {:.0f} that its memory's clock and width allow",
                    speed / 1e9, 100 * share, possible / 1e9),
        verdict == Verdict::ok ? "" : "another program on the card, a slowdown, or damaged memory");
}

namespace {

void check_one(Backend& backend, CheckReport& report) {
    CardAnswer answer;  // under load: an idle card clocks down
    const double speed = measure_copy_speed(backend, [&] { answer = ask_card(backend.bus_id()); });
    if (answer.state)
        judge_card(*answer.state, report);
    else
        report.add(Verdict::note, answer.problem,
                   "errors of the card's memory and its clocks were not looked at");
    judge_copy_speed(speed, answer.state ? answer.state->memory_speed() : 0, report);
}

}  // namespace

void add_card(int number, int count, const CheckReport& card, CheckReport& report) {
    for (const CheckFinding& f : card.findings)
        report.add(f.verdict, fmt::format("GPU {} of {}: {}", number, count, f.text), f.advice);
    report.numbers["cards"].push_back(card.numbers);
}

/// One after another: cards that copy at the same time may share what limits them.
void check_card(Examination& e, CheckReport& report) {
    Backend& backend = e.engine().backend();
    if (!backend.memory_info().exact) return report.add(Verdict::skipped, "the model runs on the CPU");
    const int count = std::max(backend.ranks(), backend.stages());
    if (count == 1) return check_one(backend, report);
    for (int i = 0; i < count; ++i) {
        CheckReport card;
        if (backend.stages() > 1)
            check_one(backend.of_stage(i), card);
        else
            backend.on_ranks([&](int rank) {
                if (rank == i) check_one(backend.of_rank(i), card);
            });
        add_card(i + 1, count, card, report);
    }
}

}  // namespace quern
