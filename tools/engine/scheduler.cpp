#include "tools/engine/scheduler.h"

#include <algorithm>

namespace quern {
namespace {

/// Rows that may run in one go: up to the next cut.
int64_t ready_rows(const Sequence& s) {
    for (const PromptCut& cut : s.cuts)
        if (cut.at > s.state.length) return std::min(s.pending(), cut.at - s.state.length);
    return s.pending();
}

}  // namespace

std::vector<Slice> next_batch(std::span<Sequence* const> running, int64_t step_tokens,
                              int64_t prompt_logits) {
    std::vector<Slice> slices;
    std::vector<Sequence*> prompts;
    int64_t budget = std::max<int64_t>(step_tokens, 1), logits = std::max<int64_t>(prompt_logits, 1);
    const auto rows_of = [&](const Sequence& s) {
        return s.wants_prompt_logits() ? std::min(ready_rows(s), logits) : ready_rows(s);
    };
    const auto take = [&](Sequence* s, int64_t most) {
        const int64_t count = std::min({rows_of(*s), most, budget});
        if (count <= 0) return;
        slices.push_back({s, s->state.length, count, count == s->pending()});
        budget -= count;
        if (s->wants_prompt_logits()) logits -= count;
    };
    for (Sequence* s : running) {
        if (s->in_prompt())
            prompts.push_back(s);
        else
            take(s, budget);
    }
    if (prompts.empty()) return slices;
    const int64_t others = prompts.size() > 1 ? budget / 2 : 0;
    const size_t oldest = slices.size();
    take(prompts.front(), budget - others);
    std::stable_sort(prompts.begin() + 1, prompts.end(),
                     [](const Sequence* a, const Sequence* b) { return a->pending() < b->pending(); });
    for (size_t i = 1; i < prompts.size(); ++i) take(prompts[i], budget);
    if (oldest < slices.size()) {  // what nobody else needed
        Slice& first = slices[oldest];
        int64_t more = std::min(budget, ready_rows(*first.sequence) - first.count);
        if (first.sequence->wants_prompt_logits()) more = std::min(more, logits);
        first.count += more;
        first.last = first.count == first.sequence->pending();
    }
    return slices;
}

}  // namespace quern
