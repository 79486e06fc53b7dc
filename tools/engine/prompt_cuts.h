// After which tokens of a prompt its state is kept. Pure host code.
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
    /// Where nothing is kept yet, no state of fewer tokens is: to read them again takes less time than the
    /// step of its own that a cut makes of the rest.
    int64_t fewest = 0;
};

/// The lengths at which the state is kept, rising, beyond `done`; no slice runs past one of them. The first
/// boundary (system and tools), the last one and the end of the prompt are where the next request most likely
/// branches off; those between are taken only where much lies between them. Each is rounded down to a
/// multiple of kPageTokens, where a cut changes no bit: who goes on from one of them reads at most
/// kPageTokens - 1 tokens again.
std::deque<int64_t> cuts_to_keep(const PromptShape& prompt);

}  // namespace quern
