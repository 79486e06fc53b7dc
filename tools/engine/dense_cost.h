// DenseCost: what another format of weights, or of the KV cache (kv_cost.h), does to a model's answers, measured on a text.
//
// Two formats of weights are never in memory together. The first one runs over the text. Of each of its rows of logits p, the
// tokens of probability 2^-14 and more are kept (at most 16,384, usually some hundred), and the sum of all others as
// one more outcome. The second one's rows q are compared with that: KL(p || q) in nats, a lower bound that misses only
// differences among the others.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/model.h"
#include "models/weight_placement.h"
#include "tools/engine/engine.h"

namespace quern {

/// A row of logits as a distribution, without its unlikely tokens.
struct LikelyTokens {
    std::vector<int32_t> ids;
    std::vector<float> log_probability;  // natural
    double rest = 0;                     // probability of all others
    int32_t best = 0;
};
LikelyTokens likely_tokens(std::span<const float> logits);
/// KL(p || softmax(logits)) in nats, not below 0; infinite if a logit is NaN.
double divergence(const LikelyTokens& p, std::span<const float> logits);

struct DenseCost {
    /// Beyond these limits another model would be answering: 0.1 nats are about 10 % of perplexity, and with one token
    /// in seven different, greedy answers part within a line.
    static constexpr double kMaxMeanKl = 0.1, kMinAgreement = 0.85;

    int64_t tokens = 0;                          // compared
    double kl_mean = 0, kl_p99 = 0, kl_max = 0;  // nats a token
    double agreement = 0;                        // share of positions with the same likeliest token
    double seconds = 0;                          // both runs and the requantizing

    bool acceptable() const { return kl_mean <= kMaxMeanKl && agreement >= kMinAgreement; }
};
/// "mean KL 0.0012, p99 0.0100, most 0.0300 nats; same likeliest token 98.9 % of 2000"
std::string describe(const DenseCost& cost);

/// What a model made of a text: its distributions at every `stride`-th position.
struct Reading {
    std::vector<int32_t> tokens;
    size_t stride = 1;
    std::vector<LikelyTokens> rows;
};
/// Runs the model over `tokens`; some 2,000 of its rows are kept. Throws Error(memory), Error(runtime).
Reading read_text(Model& model, Backend& backend, const std::vector<int32_t>& tokens,
                  const EngineOptions& options);
/// Runs it over the same tokens once more, changed; `seconds` is not set.
DenseCost compare_reading(const Reading& before, Model& model, Backend& backend,
                          const EngineOptions& options);

/// What was measured when a model was loaded.
struct MeasuredCosts {
    std::optional<DenseCost> dense, kv;
};

/// Engine options for the two runs, which take little memory.
EngineOptions dense_cost_options(const Model& model);

/// Runs `model`, loaded with OpenOptions::dense and a tokenizer, over the text, requantizes it and runs it again. It
/// stays requantized, whether that is acceptable or not. Throws Error(memory).
DenseCost requantize_measured(Model& model, Backend& backend, const OnProgress& progress);

}  // namespace quern
