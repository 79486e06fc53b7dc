// Diagnosis: what `--doctor` says about a loaded model: checks, each with its findings, on one page.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-like/json.h"

namespace quern {

/// skipped: not checked, the finding says why. note: worth knowing. wrong: the model or the machine should not be
/// trusted.
enum class Verdict : uint8_t { skipped, ok, note, wrong };
const char* verdict_name(Verdict verdict);

struct CheckFinding {
    Verdict verdict = Verdict::ok;
    std::string text;    // what was measured, and what was expected if that was not found
    std::string advice;  // what to do; empty if nothing is to be done
};

struct CheckReport {
    std::string name;
    std::vector<CheckFinding> findings;
    nlohmann::ordered_json numbers = nlohmann::ordered_json::object();  // what was measured, for programs
    double seconds = 0;

    void add(Verdict verdict, std::string text, std::string advice = {});
    /// The worst of the findings; `skipped` is the best.
    Verdict verdict() const;
};

struct Diagnosis {
    std::string model, kind, backend;  // kind: the published model whose shape and vocabulary this one has
    std::vector<CheckReport> checks;
    std::vector<std::vector<int64_t>> expert_tokens;  // [layer][expert] tokens that chose it; empty: dense
    double seconds = 0;

    Verdict verdict() const;
    int64_t count(Verdict verdict) const;  // of findings
    /// 0, or that of an invalid checkpoint if anything is wrong.
    int exit_code() const;
};

/// One page for a terminal.
std::string describe(const Diagnosis& d);
nlohmann::ordered_json to_json(const Diagnosis& d);
/// One self-contained page with a picture of the experts' load.
std::string to_html(const Diagnosis& d);

}  // namespace quern
