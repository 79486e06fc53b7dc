// Sampler: the next token from a row of logits. A pure function of (logits, settings, history, position).
//
// Order: logit bias, penalties, then the highest logit if greedy, else temperature, top-k, top-p, min-p, and a draw.
// All arithmetic in FP64 on the kept candidates, ties to the lower id. Sources: the parameters' definitions in Hugging
// Face transformers and the OpenAI API (presence, frequency).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/engine/request.h"

namespace quern {

/// `logits` [rows of the head]; only ids below `vocab` may be sampled, rows beyond are padding. `history`: prompt and
/// answer so far. The random number depends on seed and position only, never on what ran before. Throws
/// Error(runtime) if a logit is NaN or +infinity, or if none is finite.
int32_t sample(std::span<const float> logits, int64_t vocab, const Sampling& s,
               std::span<const int32_t> history, int64_t position);

/// The same among the ids that `allow` lets through, as if the logits of the others were -infinity. It is asked from the
/// likeliest on, and no longer than the settings make a difference: ids that are e^-40 times as likely as the likeliest are
/// left out. `narrow`, if there is one, first sets logits of ids that are not allowed to -infinity (Request::narrow). Throws
/// Error(runtime) also if no id is allowed.
int32_t sample_allowed(std::span<const float> logits, int64_t vocab, const Sampling& s,
                       std::span<const int32_t> history, int64_t position,
                       const std::function<bool(int32_t)>& allow,
                       const std::function<void(std::span<float>)>& narrow = {});

/// The highest logits of a row, falling, and the sum of exp((logit - highest) / temperature) over all ids.
struct TopLogits {
    std::span<const int32_t> ids;
    std::span<const float> logits;
    double sum;
};
/// Whether `sample` takes the highest logit, whatever the others are.
bool takes_highest(const Sampling& s);
/// The token that `sample` would take from the whole row, if the highest logits are enough to know it: no bias, no
/// penalty, and the set to draw from is among them.
std::optional<int32_t> sample_top(const TopLogits& top, int64_t vocab, const Sampling& s, int64_t position);

/// The token that `sample_allowed` would take from the whole row, if the highest logits are enough to know it.
std::optional<int32_t> sample_allowed_top(const TopLogits& top, int64_t vocab, const Sampling& s,
                                          int64_t position, const std::function<bool(int32_t)>& allow);

struct Candidate {
    int32_t id;
    double probability;
};
/// What `sample` draws from, most likely first; one candidate if greedy.
std::vector<Candidate> candidates(std::span<const float> logits, int64_t vocab, const Sampling& s,
                                  std::span<const int32_t> history);

}  // namespace quern
