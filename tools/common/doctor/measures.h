// What checks compute of answers and traces, apart from any model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/engine/model_trace.h"

namespace quern {

class Tokenizer;

/// The period of the loop that `tokens` ends in: the same 1 to 16 tokens at least three times, and at least 8 tokens
/// more than one period; 0: none.
int64_t loop_at_end(std::span<const int32_t> tokens);

/// For each layer the median over all tokens of |x - y| / |y|, x and y the token's residual stream in both traces.
std::vector<double> median_differences(const ModelTrace& trace, const ModelTrace& reference);

/// Sentences that are all different, `tokens` tokens of them at most, with the needle in the middle: a sentence that
/// names kNeedleNumber.
std::string haystack(const Tokenizer& tokenizer, int64_t tokens);
inline constexpr const char* kNeedleNumber = "48213";

}  // namespace quern
