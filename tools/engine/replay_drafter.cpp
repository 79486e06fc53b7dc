#include "tools/engine/replay_drafter.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/content_hash.h"

namespace quern {

/// So many tokens of the draft that follows now are right.
size_t ReplayDrafter::right_tokens(const Sequence& s) {
    ContentHash hash;
    hash.add(static_cast<int64_t>(seed_));
    hash.add(s.request.prompt.data(), s.request.prompt.size() * sizeof(int32_t));
    constexpr double kGolden = 0.6180339887498949;
    const double begin = static_cast<double>(hash.value() >> 11) * 0x1p-53;
    const double drawn = std::fmod(begin + kGolden * static_cast<double>(rounds_[s.id]++), 1.0);
    return static_cast<size_t>(
        std::count_if(acceptance_.begin(), acceptance_.end(), [&](double a) { return drawn < a; }));
}

void ReplayDrafter::propose(std::span<Draft> drafts) {
    for (Draft& draft : drafts) {
        const Sequence& s = *draft.sequence;
        const auto known = answers_.find(s.request.prompt);
        if (known == answers_.end()) continue;
        const std::vector<int32_t>& answer = known->second;
        const size_t done = s.result.tokens.size(), right = right_tokens(s);
        const size_t end =
            std::min({answer.size(), done + static_cast<size_t>(draft.most), done + acceptance_.size()});
        for (size_t i = done; i < end; ++i)
            draft.tokens.push_back(i < done + right ? answer[i] : (answer[i] > 0 ? answer[i] - 1 : 1));
    }
}

}  // namespace quern
