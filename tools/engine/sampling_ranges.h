// The ranges of sampling parameters: one table for flags, settings typed at the prompt, fields of requests, the
// checkpoint's own defaults and the engine's check, so that all of them accept the same values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tools/engine/request.h"

namespace quern {

struct SamplingRange {
    double low, high;       // both allowed
    bool whole = false;     // whole numbers only
    const char* note = "";  // what the special values mean

    /// Whether the value is in the range; compared as FP32 unless `whole`. False for NaN.
    bool holds(double value) const;
    /// "temperature: expected a number from 0 to 100 (0: greedy), found -1".
    std::string message(std::string_view field, std::string_view found) const;
};

/// One number in Sampling.
struct SamplingField {
    const char* name;     // of settings, requests and messages
    const char* synonym;  // another name; null: none
    SamplingRange range;
    double (*get)(const Sampling&);
    void (*set)(Sampling&, double);  // to a value in the range
};

std::span<const SamplingField> sampling_fields();
/// By name or synonym; null: there is none.
const SamplingField* find_sampling_field(std::string_view name);

/// As in the OpenAI API. More is never needed: logits of language models lie within some tens, so 100 already bans or
/// forces a token.
inline constexpr SamplingRange kLogitBiasRange{-100, 100, false, "added to the token's logit"};

/// Any signed 64-bit number may be a seed, as in the OpenAI API; this one means a new seed every time.
inline constexpr int64_t kRandomSeed = -1;

/// Throws Error(usage) naming the field, its range and its value, for values outside their ranges and for logit
/// biases of tokens that are not below `vocab`.
void check_sampling(const Sampling& s, int64_t vocab);

}  // namespace quern
