// The built-in texts: nats a token by kind, and the entropy of the next token.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/judgements.h"

namespace quern {
namespace {

/// Times what the published checkpoint reaches: other formats of the demo cost up to 1.03.
constexpr double kMoreNats = 1.05;
/// Shares of the entropy of a uniform choice.
constexpr double kFlat = 0.9, kCollapsed = 0.002;

struct Limit {
    double nats;      // a token
    std::string why;  // "4.1 of the published one"
};

Limit limit_of(const KnownModel* k, const TextReading& r) {
    if (k != nullptr)
        if (const auto reached = k->nats.find(r.kind); reached != k->nats.end())
            return {reached->second * kMoreNats, fmt::format("published: {:.2f}", reached->second)};
    if (k != nullptr)
        if (const auto bits = k->bits_per_byte.find(r.kind); bits != k->bits_per_byte.end())
            return {
                bits->second * std::log(2.0) * static_cast<double>(r.bytes) / static_cast<double>(r.tokens),
                fmt::format("{:.1f} bits a byte", bits->second)};
    return {r.adaptive_per_token(), "what counting gives"};
}

}  // namespace

void check_texts(Examination& e, CheckReport& report) {
    std::string good, bad;
    size_t above = 0;
    for (const TextReading& r : e.readings()) {
        if (r.tokens < 1) continue;
        const double nats = r.nats_per_token();
        const Limit limit = limit_of(e.known(), r);
        report.numbers[r.kind] = {{"tokens", r.tokens},
                                  {"nats_per_token", nats},
                                  {"limit", limit.nats},
                                  {"entropy", r.entropy_per_token()}};
        if (r.not_finite > 0) {
            report.add(Verdict::wrong,
                       fmt::format("{}: logits after {} of {} tokens are not numbers", r.kind, r.not_finite,
                                   r.tokens),
                       "see the activations below for the first layer that overflows");
        } else if (nats > limit.nats) {
            ++above;
            bad += fmt::format("{}{} {:.2f}, at most {:.2f} ({})", bad.empty() ? "" : "; ", r.kind, nats,
                               limit.nats, limit.why);
        } else {
            good += fmt::format("{}{} {:.2f}", good.empty() ? "" : ", ", r.kind, nats);
        }
    }
    if (!good.empty()) report.add(Verdict::ok, "nats a token: " + good);
    if (above == 0) return;
    // Of an unknown kind it is not known what it was trained on; but it was trained on something.
    const bool wrong = e.known() != nullptr || good.empty();
    report.add(wrong ? Verdict::wrong : Verdict::note, "nats a token above what is expected: " + bad,
               "damaged weights, a wrong tokenizer, or a kind of text that the model was never trained on");
}

void judge_entropy(double mean, double uniform, CheckReport& report) {
    report.numbers = {{"nats", mean}, {"uniform", uniform}};
    const std::string text = fmt::format(
        "the next token has an entropy of {:.2f} nats on average; a uniform choice {:.2f}", mean, uniform);
    if (mean > kFlat * uniform || !std::isfinite(mean))
        return report.add(Verdict::wrong, text, "it guesses: the head or the last layers are damaged");
    if (mean < kCollapsed * uniform)
        return report.add(Verdict::wrong, text,
                          "it is certain of everything: scales too large, or the head is damaged");
    report.add(Verdict::ok, text);
}

void check_entropy(Examination& e, CheckReport& report) {
    double sum = 0, tokens = 0;
    for (const TextReading& r : e.readings()) {
        sum += r.entropy;
        tokens += static_cast<double>(r.tokens - r.not_finite);
    }
    judge_entropy(sum / tokens, std::log(static_cast<double>(e.model().info().vocab)), report);
}
}  // namespace quern
