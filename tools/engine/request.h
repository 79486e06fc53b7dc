// Request and Result: what goes into the engine and what comes out. Text and numbers only; no tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "models/vision.h"
#include "tools/engine/speculation_options.h"

namespace quern {

/// How the next token is chosen. The initial values are neutral.
struct Sampling {
    float temperature = 1.0f;         // 0: greedy
    int top_k = 0;                    // 0: off
    float top_p = 1.0f;               // 1: off
    float min_p = 0.0f;               // 0: off
    float repetition_penalty = 1.0f;  // divides positive, multiplies negative logits of tokens seen
    float presence_penalty = 0.0f;    // subtracted once from tokens seen
    float frequency_penalty = 0.0f;   // subtracted once for each time seen
    int penalty_window = -1;          // last n tokens of prompt and answer that count as seen; -1: all
    std::vector<std::pair<int32_t, float>> logit_bias;
    uint64_t seed = 0;  // the same seed, prompt and settings give the same answer
};

enum class FinishReason { none, stop, length, cancelled, error };
const char* finish_reason_name(FinishReason reason);

/// FP32 logits of consecutive positions: a row each, with an entry for every row of the head.
struct PromptLogits {
    int64_t first;  // position
    std::span<const float> values;
    size_t width;

    size_t count() const { return values.size() / width; }
    std::span<const float> row(size_t i) const { return values.subspan(i * width, width); }
};

struct Request {
    std::vector<int32_t>
        prompt;  // at least one token; in place of an image's tokens its keys (models/vision.h)
    std::vector<ImagePtr> images;  // of the prompt, in order
    Sampling sampling;
    int64_t max_tokens = std::numeric_limits<int64_t>::max();  // also bounded by the context
    std::vector<int32_t> stop_ids;                             // end the answer; not part of it
    // Called from Engine::step, where set.
    /// For every token of the answer, stop ids excluded. Returns false to stop here.
    std::function<bool(int32_t)> on_token;
    /// For all positions of the prompt, some at a time, in order.
    std::function<void(const PromptLogits&)> on_prompt_logits;
    /// With the number of prompt tokens done: at the start (those of a kept state), then after each slice.
    std::function<void(int64_t done)> on_prefill;
    /// Before on_token, with the row of logits that the token was chosen from.
    std::function<void(int32_t id, std::span<const float> logits)> on_logits;
    /// Whether a token may come next. Refused ones are never chosen; the others keep their proportions.
    std::function<bool(int32_t id)> allow;
    /// Sets the logits of many of the ids that `allow` refuses to -infinity, which takes less than asking for each; absent: of
    /// none. Changes nothing that is chosen.
    std::function<void(std::span<float> logits)> narrow;
    /// After every token of the answer. The tokens it returns follow, whatever the model says, and go to on_token.
    std::function<std::vector<int32_t>()> force;
    /// How many of these tokens, which followed the same words before, may be drafted; absent: all. Only saves work: what
    /// the model does not choose itself is never taken.
    std::function<size_t(std::span<const int32_t> tokens)> copies;
    DraftOptions drafts;
    /// After every round with a draft: the position of its first token, its tokens, and how many of them were accepted.
    std::function<void(int64_t position, std::span<const int32_t> drafted, int64_t accepted)> on_round;
    /// For each token that the MTP layer or a DFlash drafter drafts, its row of logits: as many entries as rows of the head.
    std::function<void(std::span<const float> logits)> on_draft_logits;
    /// Whether kept states are used, and new ones kept for others. A request with on_prompt_logits uses none, since the
    /// rows that a kept state holds have no logits.
    bool use_cache = true;
    /// Requests of the same number other than 0 belong to one conversation (PrefixCache::store).
    uint64_t conversation = 0;
    /// Prompt lengths, rising, at which conversations branch. States are kept there, or at most 63 tokens before.
    std::vector<int64_t> boundaries;
};

struct Timing {
    double queue_seconds = 0;
    double prefill_seconds = 0;  // from the start of the prompt to the first token
    double decode_seconds = 0;   // from the first token to the last
};

struct Result {
    FinishReason reason = FinishReason::none;
    std::string error;  // reason == error
    std::vector<int32_t> tokens;
    int64_t prompt_tokens = 0;
    int64_t cached_tokens = 0;          // prompt tokens whose state an earlier request had left
    int64_t diverged_at = 0;            // tokens that the prompt shares with the most similar kept state
    int64_t drafted = 0, accepted = 0;  // tokens that drafters proposed; of these in the answer
    Timing timing;
};

}  // namespace quern
