// Where a prompt is cut into steps, and after which of them the state is kept. Pure host code.
#pragma once

#include <cstdint>
#include <deque>
#include <span>

namespace quern {

/// No step runs past `at` tokens; the state there is kept or not.
struct PromptCut {
    int64_t at;
    bool keep;
};

/// What is cut: a prompt of `tokens`, of which a kept state holds the first `done`. boundaries: ends of
/// messages, rising. step_tokens: rows of a step at most.
struct PromptShape {
    std::span<const int64_t> boundaries;
    int64_t tokens, done = 0, step_tokens;
};

/// For backends that are batch-invariant: cuts only where a state is kept. The first boundary (system and
/// tools), the last one and the end of the prompt are where the next request most likely branches off; those
/// between only where much lies between them.
std::deque<PromptCut> cuts_to_keep(const PromptShape& prompt);

/// For backends whose bits depend on the number of rows: each cut depends only on what comes before it, so a
/// longer prompt with the same beginning is cut there too, and one that goes on from a kept state computes
/// what it would have computed without. A boundary is a cut if kLeastCut tokens lie before it; so is every
/// step_tokens. States are kept at the last cut before the first boundary has passed, before others where
/// much lies between, and at the last cut of all.
std::deque<PromptCut> fixed_cuts(const PromptShape& prompt);

/// Shorter steps would cost a cold run time: the weights are read in each.
inline constexpr int64_t kLeastCut = 512;

}  // namespace quern
