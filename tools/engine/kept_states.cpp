#include "tools/engine/kept_states.h"

#include <algorithm>

namespace quern {

bool begins(std::span<const int32_t> prefix, std::span<const int32_t> tokens) {
    return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

KeptStates::Beginning KeptStates::beginning(std::span<const int32_t> prompt) {
    const std::lock_guard lock(mutex);
    Beginning found{.near = std::vector<int64_t>(orphans.size())};
    for (const auto& e : entries) {
        if (e->tokens.size() >= prompt.size() || !begins(e->tokens, prompt)) continue;
        if (e->saving == kNobody) found.anywhere = std::max(found.anywhere, e->length());
        for (size_t r = 0; r < found.near.size(); ++r)
            if (e->is_near(r) || e->saving == r) found.near[r] = std::max(found.near[r], e->length());
    }
    return found;
}

size_t KeptStates::join() {
    const std::lock_guard lock(mutex);
    orphans.emplace_back();
    return orphans.size() - 1;
}

}  // namespace quern
