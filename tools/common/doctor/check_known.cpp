// Known answers: token ids in, token ids out.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "ggml-like/backend.h"
#include "tools/common/doctor/checks.h"

namespace quern {
namespace {

/// How far numbers may be from the reference's.
struct Tolerance {
    double nats;  // of log-probabilities, on average
    double rms;   // of the size of the residual stream, relative
};
/// The same weights in FP32: the demo is 2e-6 nats and 1e-7 from it; a shift of the scales of one expert's matrix by a
/// block, the smallest of the faults that are tested, makes 2e-3 and 9e-5 of that.
constexpr Tolerance kSameWeights{2e-4, 2e-5};
/// Other formats of the same weights: recipes of quantize-inspect --write and --dense move the demo by 0.016 nats and
/// 0.005 at most. So much is left to BF16 activations, too.
constexpr Tolerance kRounded{0.05, 0.02};

constexpr const char* kWrongWeights =
    "weights are not what they should be: check the files against their source (quantize-inspect --health; "
    "--against DIR of another copy), then load them again";

int32_t likeliest(std::span<const float> row) {
    return static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

/// Calls examine(position, row of logits) for every token of the prompt.
template <typename F>
void read_prompt(Examination& e, const std::vector<int32_t>& prompt, const F& examine) {
    Request request;
    request.prompt = prompt;
    request.max_tokens = 0;
    const auto vocab = static_cast<size_t>(e.model().info().vocab);
    request.on_prompt_logits = [&](const PromptLogits& logits) {
        for (size_t i = 0; i < logits.count(); ++i)
            examine(static_cast<size_t>(logits.first) + i, logits.row(i).first(vocab));
    };
    e.run(std::move(request));
}

/// Whether the embedding is the published one's.
bool same_embedding(Examination& e) {
    const KnownModel& k = *e.known();
    const int32_t token = k.embedding_token;
    if (token < 0) return false;
    const ModelTrace trace = trace_prompt(e.model(), e.engine().backend(), std::span(&token, 1));
    for (size_t i = 0; i < k.embedding_row.size(); ++i)
        if (!(std::fabs(static_cast<double>(trace.embedding[i]) - k.embedding_row[i]) <=
              k.embedding_tolerance))
            return false;
    return true;
}

struct Agreement {
    int64_t same = 0, all = 0;
    std::string first;  // difference
    void add(int32_t found, int32_t expected, const std::string& where) {
        ++all;
        same += found == expected;
        if (found != expected && first.empty())
            first = fmt::format("{}: expected {}, found {}", where, expected, found);
    }
};

Agreement compare_greedy(Examination& e) {
    std::vector<Request> requests;
    for (const KnownAnswer& a : e.known()->answers)
        requests.push_back(Examination::greedy(a.prompt, static_cast<int64_t>(a.answer.size())));
    const std::vector<Result> results = e.run(std::move(requests));
    Agreement agreement;
    for (size_t i = 0; i < results.size(); ++i) {
        const std::vector<int32_t>& expected = e.known()->answers[i].answer;
        for (size_t t = 0; t < expected.size(); ++t)
            agreement.add(t < results[i].tokens.size() ? results[i].tokens[t] : -1, expected[t],
                          fmt::format("answer {}, token {}", i + 1, t + 1));
    }
    return agreement;
}

Agreement compare_likeliest(Examination& e) {
    Agreement agreement;
    for (const KnownAnswer& a : e.known()->likeliest)
        read_prompt(e, a.prompt, [&](size_t position, std::span<const float> row) {
            agreement.add(likeliest(row), a.answer[position],
                          fmt::format("likeliest after prompt token {}", position + 1));
        });
    return agreement;
}

/// A fine-tune may answer otherwise. Published weights may not, nor does a fine-tune of them forget most of it.
Verdict judge(const Agreement& a, bool published) {
    if (a.same == a.all) return Verdict::ok;
    return published && 2 * a.same < a.all ? Verdict::wrong : Verdict::note;
}

void add_agreement(CheckReport& report, const char* what, const Agreement& a, bool published,
                   const KnownModel& k) {
    if (a.all == 0) return;
    report.numbers[what] = {{"same", a.same}, {"of", a.all}};
    const Verdict verdict = judge(a, published);
    if (verdict == Verdict::ok)
        return report.add(verdict, fmt::format("{} of {} {} as {}", a.same, a.all, what, k.agreed));
    report.add(
        verdict,
        fmt::format("{} of {} {} as {}; first difference: {}", a.same, a.all, what, k.agreed, a.first),
        verdict == Verdict::wrong
            ? kWrongWeights
            : "expected of a fine-tune or another quantization; of the published checkpoint it is not");
}

/// The first layer whose residual stream is not as large as the reference's; -1: none.
int64_t first_other_layer(const ModelTrace& trace, const std::vector<double>& rms, double tolerance) {
    for (size_t l = 0; l < rms.size(); ++l)
        if (!(std::fabs(trace.rms(l) / rms[l] - 1) <= tolerance)) return static_cast<int64_t>(l);
    return -1;
}

double difference_at(const KnownNumbers& n, size_t position, std::span<const float> row) {
    return std::fabs(-surprise(row, n.prompt[position + 1]) - n.log_probability[position]);
}

/// What a backend makes of the reference's prompt.
struct Numbers {
    ModelTrace trace;
    double difference = 0;  // of log-probabilities, nats on average
};

/// As requests are run.
Numbers measure(Examination& e, const KnownNumbers& n) {
    Numbers m{.trace = trace_prompt(e.model(), e.engine().backend(), n.prompt)};
    read_prompt(e, n.prompt, [&](size_t position, std::span<const float> row) {
        if (position + 1 < n.prompt.size()) m.difference += difference_at(n, position, row);
    });
    m.difference /= static_cast<double>(n.log_probability.size());
    return m;
}

/// Of a model that no engine runs.
Numbers measure(const SecondModel& second, const KnownNumbers& n) {
    Numbers m{.trace = trace_prompt(*second.model, *second.backend, n.prompt, true)};
    const ModelInfo& info = second.model->info();
    for (size_t i = 0; i + 1 < n.prompt.size(); ++i)
        m.difference += difference_at(n, i,
                                      std::span(m.trace.logits)
                                          .subspan(i * static_cast<size_t>(info.vocab_rows))
                                          .first(static_cast<size_t>(info.vocab)));
    m.difference /= static_cast<double>(n.log_probability.size());
    return m;
}

/// `where`: "" or "on the CPU, ".
void judge_numbers(const Numbers& m, const KnownNumbers& n, const char* where, bool published,
                   bool same_bytes, CheckReport& report) {
    const bool exact = m.trace.activation == DType::F32;
    const Tolerance& tolerance = same_bytes && exact ? kSameWeights : kRounded;
    const int64_t layer = first_other_layer(m.trace, n.residual_rms, tolerance.rms);
    report.numbers["mean_difference_nats"] = m.difference;
    report.numbers["first_other_layer"] = layer;
    report.numbers["residual_rms"] = nlohmann::ordered_json::array();
    for (size_t l = 0; l < m.trace.layers.size(); ++l)
        report.numbers["residual_rms"].push_back(m.trace.rms(l));

    const Verdict bad = published ? Verdict::wrong : Verdict::note;
    const char* advice = published ? kWrongWeights : "expected of another training";
    const bool close = m.difference <= tolerance.nats;
    report.add(
        close ? Verdict::ok : bad,
        fmt::format("{}log-probabilities of {} tokens are {:.2g} nats from the reference's on average; "
                    "{:.2g} allowed for {}",
                    where, n.log_probability.size(), m.difference, tolerance.nats,
                    !same_bytes ? "another format of these weights"
                    : exact     ? "the same weights in FP32"
                                : "the same weights in BF16"),
        close ? "" : advice);
    if (layer < 0)
        return report.add(
            Verdict::ok,
            fmt::format("{}the residual stream is as large as the reference's after every layer", where));
    report.add(bad,
               fmt::format("{}after layer {} the residual stream has a root mean square of {:.6g}, the "
                           "reference's {:.6g}: the first layer that is not itself",
                           where, layer, m.trace.rms(static_cast<size_t>(layer)),
                           n.residual_rms[static_cast<size_t>(layer)]),
               close ? advice : "");  // else it was said above
}

}  // namespace

void check_known_answers(Examination& e, CheckReport& report) {
    const KnownModel* k = e.known();
    if (k == nullptr)
        return report.add(
            Verdict::skipped,
            "no published model of this shape and vocabulary is known: nothing to compare with");
    const bool published = same_embedding(e);
    report.numbers["published_embedding"] = published;
    if (k->embedding_token >= 0)
        report.add(
            published ? Verdict::ok : Verdict::note,
            fmt::format("the embedding of token {} is {}{}'s", k->embedding_token, published ? "" : "not ",
                        k->name),
            published
                ? ""
                : "another training, or a quantized embedding: what follows is information, not failure");
    add_agreement(report, "greedy tokens", compare_greedy(e), published, *k);
    add_agreement(report, "likeliest tokens", compare_likeliest(e), published, *k);
}

void check_known_numbers(Examination& e, CheckReport& report) {
    const KnownModel* k = e.known();
    if (k == nullptr || !k->numbers)
        return report.add(Verdict::skipped, "no log-probabilities of a reference are known for this model");
    const KnownNumbers& n = *k->numbers;
    const bool published = same_embedding(e), same_bytes = e.model().info().weight_bytes == n.weight_bytes;
    const Numbers here = measure(e, n);
    judge_numbers(here, n, "", published, same_bytes, report);
    // BF16 activations hide a fault in a single expert; the same files on the CPU do not.
    if (here.trace.activation != DType::F32 && e.options().open_on_cpu)
        judge_numbers(measure(e.options().open_on_cpu(), n), n, "on the CPU, ", published, same_bytes,
                      report);
}

}  // namespace quern
