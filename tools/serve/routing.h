// Which replica a request goes to. A pure function: knows counts of tokens, no engines and no threads.
//
// All costs are in tokens of a prompt, the time that reading one takes: what waits at a replica, what it would have to
// read, and what it takes to bring a state over from memory that all replicas share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace quern {

/// What is known of a replica.
struct ReplicaLoad {
    bool has_room = false;  // a slot is free
    int64_t running = 0;    // answers that it has
    int64_t unread = 0;     // tokens of their prompts that it has not read yet
    int64_t kept = 0;       // tokens of this request's prompt whose state is in its own memory
};

struct PromptToPlace {
    int64_t tokens = 0;
    int64_t kept_anywhere = 0;  // tokens whose state is in memory that all replicas can read
};

/// An answer that runs slows others down as much as so many tokens of prompts.
inline constexpr int64_t kAnswerCost = 64;
/// A state comes over at some cost, whatever its length, and so many of its tokens in the time of one that is read.
inline constexpr int64_t kMoveCost = 32, kMovedTokens = 64;

/// What the request costs before its first token if it goes there: the wait, and reading or copying its prompt.
int64_t cost_at(const ReplicaLoad& replica, const PromptToPlace& prompt);

/// The replica with room where the request costs least; of equals the one with fewest answers, then the first. Nothing: none
/// has room.
std::optional<size_t> choose_replica(std::span<const ReplicaLoad> replicas, const PromptToPlace& prompt);

}  // namespace quern
