#include "tools/engine/dense_cost.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/parallel.h"
#include "models/tokenizer.h"
#include "tools/engine/sample_text.h"

namespace quern {
namespace {

constexpr int64_t kTextTokens = 2000;
constexpr int64_t kRows = 64;               // of logits in a step, and examined together
constexpr float kLeastLikely = -9.704061f;  // log 2^-14

struct Normalizer {
    float highest;
    double log_sum;  // of exp(logit)
};
Normalizer normalizer(std::span<const float> logits) {
    const float highest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float x : logits) sum += std::exp(x - highest);
    return {highest, highest + std::log(sum)};
}

/// Runs the model over `tokens` and calls examine(position, row of logits) on several threads.
template <typename F>
void run_text(Model& model, Backend& backend, const std::vector<int32_t>& tokens,
              const EngineOptions& options, const F& examine) {
    Engine engine(model, backend, options);
    const auto vocab = static_cast<size_t>(model.info().vocab);
    Request request;
    request.prompt = tokens;
    request.max_tokens = 0;
    request.on_prompt_logits = [&](const PromptLogits& logits) {
        for_each_parallel(backend.threads(), logits.count(), [&](size_t i) {
            examine(static_cast<size_t>(logits.first) + i, logits.row(i).first(vocab));
        });
    };
    const Result result = engine.run(std::move(request));
    if (result.reason == FinishReason::error)
        FAIL(runtime, "the comparison of formats failed: {}", result.error);
}

std::vector<int32_t> sample_tokens(const Model& model) {
    CHECK(model.tokenizer() != nullptr, "[requantize_measured] {} has no tokenizer", model.info().name);
    std::vector<int32_t> tokens = model.tokenizer()->encode(kSampleText, Tokenizer::Markers::control);
    const int64_t most = std::min(kTextTokens, model.info().context - 1);
    if (static_cast<int64_t>(tokens.size()) > most) tokens.resize(static_cast<size_t>(most));
    return tokens;
}

DenseCost summary(std::vector<double> kl, int64_t same) {
    const auto count = static_cast<double>(kl.size());
    DenseCost cost{.tokens = static_cast<int64_t>(kl.size()), .agreement = static_cast<double>(same) / count};
    for (const double d : kl) cost.kl_mean += d / count;
    std::sort(kl.begin(), kl.end());
    cost.kl_p99 = kl[kl.size() * 99 / 100];
    cost.kl_max = kl.back();
    return cost;
}

}  // namespace

LikelyTokens likely_tokens(std::span<const float> logits) {
    const Normalizer n = normalizer(logits);
    LikelyTokens p{.rest = 1};
    for (size_t i = 0; i < logits.size(); ++i) {
        const double log_probability = logits[i] - n.log_sum;
        if (!(log_probability >= kLeastLikely)) continue;
        if (p.ids.empty() || logits[i] > logits[static_cast<size_t>(p.best)])
            p.best = static_cast<int32_t>(i);
        p.ids.push_back(static_cast<int32_t>(i));
        p.log_probability.push_back(static_cast<float>(log_probability));
        p.rest -= std::exp(log_probability);
    }
    p.rest = std::max(p.rest, 0.0);
    return p;
}

double divergence(const LikelyTokens& p, std::span<const float> logits) {
    const Normalizer n = normalizer(logits);
    double kl = 0, rest = 1;
    for (size_t i = 0; i < p.ids.size(); ++i) {
        const double log_p = p.log_probability[i], log_q = logits[static_cast<size_t>(p.ids[i])] - n.log_sum;
        kl += std::exp(log_p) * (log_p - log_q);
        rest -= std::exp(log_q);
    }
    // Smaller remainders are rounding errors, not probabilities.
    constexpr double kRounding = 1e-6;
    if (p.rest > kRounding) kl += p.rest * std::log(p.rest / std::max(rest, kRounding));
    return std::isnan(kl) ? INFINITY : std::max(kl, 0.0);
}

std::string describe(const DenseCost& c) {
    return fmt::format("mean KL {:.4f}, p99 {:.4f}, most {:.4f} nats; same likeliest token {:.1f} % of {}",
                       c.kl_mean, c.kl_p99, c.kl_max, 100 * c.agreement, c.tokens);
}

EngineOptions dense_cost_options(const Model& model) {
    return {.context = std::min<int64_t>(kTextTokens + 1, model.info().context),
            .sequences = 1,
            .step_tokens = kRows,
            .prompt_logits = kRows};
}

Reading read_text(Model& model, Backend& backend, const std::vector<int32_t>& tokens,
                  const EngineOptions& options) {
    const auto most = static_cast<size_t>(kTextTokens);
    Reading reading{.tokens = tokens, .stride = std::max<size_t>(1, (tokens.size() + most - 1) / most)};
    const size_t stride = reading.stride;
    reading.rows.resize((tokens.size() + stride - 1) / stride);
    run_text(model, backend, tokens, options, [&](size_t position, std::span<const float> row) {
        if (position % stride == 0) reading.rows[position / stride] = likely_tokens(row);
    });
    return reading;
}

DenseCost compare_reading(const Reading& before, Model& model, Backend& backend,
                          const EngineOptions& options) {
    std::vector<double> kl(before.rows.size());
    std::atomic<int64_t> same = 0;
    run_text(model, backend, before.tokens, options, [&](size_t position, std::span<const float> row) {
        if (position % before.stride != 0) return;
        const LikelyTokens& p = before.rows[position / before.stride];
        kl[position / before.stride] = divergence(p, row);
        same += std::max_element(row.begin(), row.end()) - row.begin() == p.best;
    });
    return summary(std::move(kl), same);
}

DenseCost requantize_measured(Model& model, Backend& backend, const OnProgress& progress) {
    const auto begin = std::chrono::steady_clock::now();
    const Reading before = read_text(model, backend, sample_tokens(model), dense_cost_options(model));
    requantize_weights(model, backend, progress);
    DenseCost cost = compare_reading(before, model, backend, dense_cost_options(model));
    cost.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return cost;
}

}  // namespace quern
