// Request and Result: what goes into the engine and comes out. Text and numbers only; no tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace quern {

/// How the next token is chosen. Neutral values: the parameter does nothing.
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

/// FP32 logits of neighbouring positions, each a row with an entry for every row of the vocabulary.
struct PromptLogits {
    int64_t first;  // position
    std::span<const float> values;
    size_t width;

    size_t count() const { return values.size() / width; }
    std::span<const float> row(size_t i) const { return values.subspan(i * width, width); }
};

struct Request {
    std::vector<int32_t> prompt;  // at least one token
    Sampling sampling;
    int64_t max_tokens = std::numeric_limits<int64_t>::max();  // also bounded by the context
    std::vector<int32_t> stop_ids;                             // end the answer; not part of it
    /// Called from Engine::step for every token of the answer, stop ids excluded. Return false to stop here.
    std::function<bool(int32_t)> on_token;
    /// If set: called for all positions of the prompt, some at a time, in order.
    std::function<void(const PromptLogits&)> on_prompt_logits;
    /// Called with prompt tokens done so far: when the prompt's turn comes (those whose state was kept), and
    /// after each chunk.
    std::function<void(int64_t done)> on_prefill;
    /// If set: called before on_token with the row of logits that the token was chosen from.
    std::function<void(int32_t id, std::span<const float> logits)> on_logits;
    /// If set: whether a token may come next. What it refuses is never chosen; the others keep their
    /// proportions.
    std::function<bool(int32_t id)> allow;
    /// If set: asked after every token of the answer; what it returns follows, whatever the model says. Each
    /// of these tokens goes to on_token.
    std::function<std::vector<int32_t>()> force;
    /// Whether kept states are used and left for others. Rows that a kept state holds have no logits, so a
    /// request with on_prompt_logits leaves states but uses none.
    bool use_cache = true;
    /// Prompt lengths, rising, at which conversations branch: states there, or at most 63 tokens before, are
    /// kept for later requests.
    std::vector<int64_t> boundaries;
};

struct Timing {
    double queue_seconds = 0;
    double prefill_seconds = 0;  // from the first prompt row run to the first token
    double decode_seconds = 0;   // from the first token to the last
};

struct Result {
    FinishReason reason = FinishReason::none;
    std::string error;  // reason == error
    std::vector<int32_t> tokens;
    int64_t prompt_tokens = 0;
    int64_t cached_tokens = 0;  // of the prompt: their state was kept from an earlier request
    int64_t diverged_at = 0;    // tokens that the prompt shares with the most similar kept state
    Timing timing;
};

}  // namespace quern
