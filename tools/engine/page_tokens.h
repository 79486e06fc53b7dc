// Multiples of kPageTokens: where prompts are cut and states are kept.
#pragma once

#include <cstdint>

#include "ggml-like/ops/batch.h"

namespace quern {

constexpr int64_t round_down_to_page(int64_t tokens) { return tokens / kPageTokens * kPageTokens; }
constexpr int64_t round_up_to_page(int64_t tokens) { return round_down_to_page(tokens + kPageTokens - 1); }
constexpr bool at_page_end(int64_t tokens) { return tokens % kPageTokens == 0; }

}  // namespace quern
