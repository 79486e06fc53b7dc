// The GPU against the CPU: the residual stream of the same tokens, layer by layer.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "ggml-like/backend.h"
#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/measures.h"

namespace quern {
namespace {

/// Relative difference of a token's residual stream, the median of all tokens. A GPU computes with BF16 activations,
/// whose rounding adds up over the layers; a token that takes another expert for it is no median.
constexpr double kDiffers = 0.08, kWrong = 0.3;
constexpr int64_t kFirst = 64;        // tokens, to see how long a token takes
constexpr double kShareOfTime = 0.6;  // of what is left

double relative(std::span<const float> a, std::span<const float> b) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double x = a[i], y = b[i];
        difference += (x - y) * (x - y);
        size += y * y;
    }
    const double r = std::sqrt(difference / size);
    return std::isnan(r) ? HUGE_VAL : r;
}

}  // namespace

std::vector<double> median_differences(const ModelTrace& trace, const ModelTrace& reference) {
    std::vector<double> medians;
    for (size_t l = 0; l < reference.layers.size(); ++l) {
        const auto &a = trace.layers[l].residual, &b = reference.layers[l].residual;
        const size_t width = b.size() / static_cast<size_t>(reference.tokens);
        std::vector<double> of_tokens;
        for (size_t t = 0; t < static_cast<size_t>(reference.tokens); ++t)
            of_tokens.push_back(
                relative(std::span(a).subspan(t * width, width), std::span(b).subspan(t * width, width)));
        std::nth_element(of_tokens.begin(),
                         of_tokens.begin() + static_cast<std::ptrdiff_t>(of_tokens.size() / 2),
                         of_tokens.end());
        medians.push_back(of_tokens[of_tokens.size() / 2]);
    }
    return medians;
}

void check_against_cpu(Examination& e, CheckReport& report) {
    if (!e.options().open_on_cpu)
        return report.add(Verdict::skipped,
                          e.engine().backend().captures()
                              ? "--dense changes the weights at load; the CPU would have others"
                              : "the model runs on the CPU");
    const SecondModel cpu = e.options().open_on_cpu();
    std::vector<int32_t> ids = e.trace_tokens(kMaxTraceTokens);
    const double begin = e.seconds();
    const auto first = std::min<int64_t>(kFirst, static_cast<int64_t>(ids.size()));
    ModelTrace reference =
        trace_prompt(*cpu.model, *cpu.backend, std::span(ids).first(static_cast<size_t>(first)));
    const double rate = static_cast<double>(first) / (e.seconds() - begin);
    const auto possible = static_cast<int64_t>(rate * kShareOfTime * e.seconds_left()) / kFirst * kFirst;
    const int64_t tokens = std::clamp<int64_t>(possible, first, static_cast<int64_t>(ids.size()));
    ids.resize(static_cast<size_t>(tokens));
    if (tokens > first) reference = trace_prompt(*cpu.model, *cpu.backend, ids);
    const ModelTrace trace = trace_prompt(e.model(), e.engine().backend(), ids);
    const std::vector<double> medians = median_differences(trace, reference);
    const double last = medians.back(), most = *std::max_element(medians.begin(), medians.end());
    const auto differs =
        std::find_if(medians.begin(), medians.end(), [](double m) { return !(m <= kDiffers); });
    report.numbers = {{"tokens", tokens}, {"median_relative_difference", medians}};
    std::string text = fmt::format(
        "{} tokens: after the last layer the GPU's residual stream is {:.2g} from the "
        "CPU's, at most {:.2f} expected of BF16",
        tokens, last, kDiffers);
    if (differs == medians.end()) return report.add(Verdict::ok, text);
    text += fmt::format("; the first layer that differs is {} ({:.2g})", differs - medians.begin(), *differs);
    report.add(most <= kWrong ? Verdict::note : Verdict::wrong, text,
               "a kernel or the card computes something else: run scripts/gpu_check.sh, then report it");
}

}  // namespace quern
