#include "tools/engine/scheduler.h"

#include <algorithm>

namespace quern {

std::vector<Slice> next_batch(std::span<Sequence* const> running, int64_t step_tokens,
                              int64_t prompt_logits) {
    std::vector<Slice> slices;
    int64_t budget = std::max<int64_t>(step_tokens, 1), logits = std::max<int64_t>(prompt_logits, 1);
    const auto take = [&](Sequence* s) {
        const bool all = s->wants_prompt_logits();
        const int64_t count = std::min(s->pending(), all ? std::min(budget, logits) : budget);
        if (count <= 0) return;
        slices.push_back({s, s->state.length, count, count == s->pending()});
        budget -= count;
        if (all) logits -= count;
    };
    for (Sequence* s : running)
        if (!s->in_prompt()) take(s);
    for (Sequence* s : running)
        if (s->in_prompt()) take(s);
    return slices;
}

}  // namespace quern
