#include "tools/engine/prompt_cuts.h"

namespace quern {
namespace {

constexpr int64_t kFarApart = 2048;  // states that are kept between the first and the last boundary

}  // namespace

std::deque<PromptCut> cuts_to_keep(const PromptShape& prompt) {
    std::deque<PromptCut> cuts;
    int64_t kept = prompt.done;
    for (size_t i = 0; i < prompt.boundaries.size(); ++i) {
        const int64_t at = prompt.boundaries[i];
        const bool edge = i == 0 || i + 1 == prompt.boundaries.size();
        if (at <= kept || at >= prompt.tokens || (!edge && at - kept < kFarApart)) continue;
        cuts.push_back({kept = at, true});
    }
    cuts.push_back({prompt.tokens, true});
    return cuts;
}

std::deque<PromptCut> fixed_cuts(const PromptShape& prompt) {
    std::deque<PromptCut> cuts;
    int64_t last = 0, kept = prompt.done;
    const auto cut = [&](int64_t at) {
        last = at;
        if (at > prompt.done) cuts.push_back({at, false});
    };
    const auto cut_steps = [&](int64_t end) {
        while (end - last > prompt.step_tokens) cut(last + prompt.step_tokens);
    };
    for (size_t i = 0; i < prompt.boundaries.size() && prompt.boundaries[i] < prompt.tokens; ++i) {
        const int64_t at = prompt.boundaries[i];
        cut_steps(at);
        if (at - last >= kLeastCut) cut(at);
        const bool fresh = last > kept && !cuts.empty();
        if (fresh && (i == 0 || last - kept >= kFarApart)) cuts.back().keep = true, kept = last;
    }
    cut_steps(prompt.tokens);
    if (!cuts.empty()) cuts.back().keep = true;
    return cuts;
}

}  // namespace quern
