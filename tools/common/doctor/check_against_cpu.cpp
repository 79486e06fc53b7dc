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
constexpr int64_t kFirst = 64;  // tokens of the first prompt
constexpr double kTwice =
    1.75;  // times as long as a prompt takes one of twice its length: weights are read once
constexpr double kSpare = 0.3;  // seconds, for the GPU's part

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

void append(ModelTrace& all, ModelTrace part) {
    if (all.tokens == 0) {
        all = std::move(part);
        return;
    }
    all.tokens += part.tokens;
    for (size_t l = 0; l < all.layers.size(); ++l) {
        const std::vector<float>& more = part.layers[l].residual;
        all.layers[l].residual.insert(all.layers[l].residual.end(), more.begin(), more.end());
    }
}

}  // namespace

ModelTrace trace_in_parts(const Model& model, Backend& backend, std::span<const int32_t> tokens,
                          const std::function<double()>& seconds_left) {
    ModelTrace all;
    double last = 0;  // seconds of the longest prompt so far
    while (!tokens.empty()) {
        const double before = seconds_left();
        if (all.tokens > 0 && kTwice * last + kSpare > before) break;
        const size_t count = std::min(static_cast<size_t>(std::max(kFirst, all.tokens)), tokens.size());
        append(all, trace_prompt(model, backend, tokens.first(count)));
        tokens = tokens.subspan(count);
        last = before - seconds_left();
    }
    return all;
}

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
    if (!e.reference().valid())
        return report.add(Verdict::skipped,
                          e.engine().backend().captures()
                              ? "--dense changes the weights at load; the CPU would have others"
                              : "the model runs on the CPU");
    const ModelTrace reference = e.reference().get();
    const int64_t tokens = reference.tokens;
    std::vector<int32_t> ids = e.trace_tokens(kMaxTraceTokens);
    ids.resize(static_cast<size_t>(tokens));
    const ModelTrace trace = trace_in_parts(e.model(), e.engine().backend(), ids, [] { return HUGE_VAL; });
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
