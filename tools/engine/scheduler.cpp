#include "tools/engine/scheduler.h"

#include <algorithm>

namespace quern {

std::vector<Slice> next_batch(std::span<Sequence* const> running, int64_t step_tokens) {
    std::vector<Slice> slices;
    int64_t budget = std::max<int64_t>(step_tokens, 1);
    const auto take = [&](Sequence* s) {
        const int64_t count = std::min(s->pending(), budget);
        if (count <= 0) return;
        slices.push_back({s, s->state.length, count, count == s->pending()});
        budget -= count;
    };
    for (Sequence* s : running)
        if (!s->in_prompt()) take(s);
    for (Sequence* s : running)
        if (s->in_prompt()) take(s);
    return slices;
}

}  // namespace quern
