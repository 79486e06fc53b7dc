#include "tools/common/doctor/diagnosis.h"

#include <algorithm>

#include "ggml-like/error.h"

namespace quern {

const char* verdict_name(Verdict verdict) {
    static constexpr const char* kNames[] = {"skip", "ok", "note", "wrong"};
    return kNames[static_cast<size_t>(verdict)];
}

void CheckReport::add(Verdict verdict, std::string text, std::string advice) {
    findings.push_back({verdict, std::move(text), std::move(advice)});
}

Verdict CheckReport::verdict() const {
    Verdict worst = Verdict::skipped;
    for (const CheckFinding& f : findings) worst = std::max(worst, f.verdict);
    return worst;
}

Verdict Diagnosis::verdict() const {
    Verdict worst = Verdict::skipped;
    for (const CheckReport& c : checks) worst = std::max(worst, c.verdict());
    return worst;
}

int64_t Diagnosis::count(Verdict verdict) const {
    int64_t n = 0;
    for (const CheckReport& c : checks)
        n += std::count_if(c.findings.begin(), c.findings.end(),
                           [&](const CheckFinding& f) { return f.verdict == verdict; });
    return n;
}

int Diagnosis::exit_code() const {
    return verdict() == Verdict::wrong ? static_cast<int>(ErrorKind::model) : 0;
}

}  // namespace quern
