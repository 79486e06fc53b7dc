#include "tools/serve/routing.h"

#include <algorithm>

namespace quern {

int64_t cost_at(const ReplicaLoad& replica, const PromptToPlace& prompt) {
    const int64_t wait = replica.unread + kAnswerCost * replica.running;
    const int64_t here = prompt.tokens - std::min(replica.kept, prompt.tokens);
    if (prompt.kept_anywhere <= replica.kept) return wait + here;
    const int64_t rest = prompt.tokens - std::min(prompt.kept_anywhere, prompt.tokens);
    const int64_t moved = rest + kMoveCost + prompt.kept_anywhere / kMovedTokens;
    return wait + std::min(here, moved);
}

std::optional<size_t> choose_replica(std::span<const ReplicaLoad> replicas, const PromptToPlace& prompt) {
    std::optional<size_t> best;
    int64_t least = 0;
    for (size_t i = 0; i < replicas.size(); ++i) {
        const ReplicaLoad& replica = replicas[i];
        if (!replica.has_room) continue;
        const int64_t cost = cost_at(replica, prompt);
        if (best && (cost > least || (cost == least && replica.running >= replicas[*best].running))) continue;
        best = i;
        least = cost;
    }
    return best;
}

}  // namespace quern
