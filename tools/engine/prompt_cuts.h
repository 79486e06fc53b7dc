// Where in a prompt its state is kept. Pure host code.
#pragma once

#include <cstdint>
#include <deque>
#include <span>

namespace quern {

/// A prompt of `tokens`, of which a kept state holds the first `done`.
struct PromptShape {
    std::span<const int64_t> boundaries;  // ends of messages, rising
    int64_t tokens;
    int64_t done = 0;
    /// A prompt that uses no kept state leaves none of fewer tokens: reading them again is faster than the extra step
    /// that a cut costs.
    int64_t fewest = 0;
    std::span<const int64_t> images = {};  // where images end, rising: other questions may follow each
};

/// The lengths at which the state is kept, rising, beyond `done`; no slice runs past one of them. The next request most
/// likely branches off at the first boundary (system and tools), at the last one or at the end of the prompt;
/// boundaries between are used only if they are far apart. Each is rounded down to a multiple of kPageTokens, where a
/// cut changes no bit, so a later prompt reads at most kPageTokens - 1 tokens again.
std::deque<int64_t> cuts_to_keep(const PromptShape& prompt);

}  // namespace quern
