// DenseCost: what requantizing a model at load does to its answers, measured on a built-in text.
//
// The two models are never in memory together. The first one runs over the text, and of each row of logits p
// the tokens of probability 2^-14 and more are kept (at most 16,384 a row, usually some hundred), with what
// remains as one more outcome; the second one's rows q are compared with that: KL(p || q) in nats, a lower
// bound that misses only what happens inside the remainder.
#pragma once

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
    /// Beyond this it is another model that answers: 0.1 nats are about 10 % of perplexity, and at one token
    /// in seven greedy answers part within a line.
    static constexpr double kMaxMeanKl = 0.1, kMinAgreement = 0.85;

    int64_t tokens = 0;                          // compared
    double kl_mean = 0, kl_p99 = 0, kl_max = 0;  // nats a token
    double agreement = 0;                        // share of positions with the same likeliest token
    double seconds = 0;                          // both runs and the requantizing

    bool acceptable() const { return kl_mean <= kMaxMeanKl && agreement >= kMinAgreement; }
};
/// "mean KL 0.0012, p99 0.0100, most 0.0300 nats; same likeliest token 98.9 % of 2000"
std::string describe(const DenseCost& cost);

/// Engine settings for the two runs: what they take is small.
EngineOptions dense_cost_options(const Model& model);

/// Runs `model` over the text, requantizes it, runs it again. `model` was loaded with OpenOptions::dense and
/// a tokenizer. Afterwards it is the requantized one, whether that is acceptable or not. Throws
/// Error(memory).
DenseCost requantize_measured(Model& model, Backend& backend, const OnProgress& progress);

}  // namespace quern
