// What sampling parameters may be: one table for flags, settings typed at the prompt, fields of requests, the
// checkpoint's own defaults and the engine's check. What one of them takes, all of them take.
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

    /// Whether Sampling can hold the value: numbers that are not whole are compared as FP32. Never NaN.
    bool holds(double value) const;
    /// "temperature: expected a number from 0 to 100 (0: greedy), found -1".
    std::string message(std::string_view field, std::string_view found) const;
};

/// A number of Sampling.
struct SamplingField {
    const char* name;     // of settings, requests and messages
    const char* synonym;  // another name of it; null: none
    SamplingRange range;
    double (*get)(const Sampling&);
    void (*set)(Sampling&, double);  // of a value that the range holds
};

std::span<const SamplingField> sampling_fields();
/// By name or synonym; null: there is none.
const SamplingField* find_sampling_field(std::string_view name);

/// The OpenAI API documents -100 to 100. More is never needed: the logits of language models lie within some
/// tens, so 100 already bans or forces a token.
inline constexpr SamplingRange kLogitBiasRange{-100, 100, false, "added to the token's logit"};

/// A seed may be any signed 64-bit number, as in the OpenAI API; this one asks for a new one every time.
inline constexpr int64_t kRandomSeed = -1;

/// Throws Error(usage) naming the field, what it may be and what it was: values outside of their ranges, and
/// logit biases of tokens that are not below `vocab`.
void check_sampling(const Sampling& s, int64_t vocab);

}  // namespace quern
