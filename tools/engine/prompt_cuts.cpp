#include "tools/engine/prompt_cuts.h"

#include <algorithm>

#include "tools/engine/page_tokens.h"

namespace quern {
namespace {

constexpr int64_t kFarApart = 2048;  // states that are kept between the first and the last boundary

}  // namespace

std::deque<int64_t> cuts_to_keep(const PromptShape& prompt) {
    std::deque<int64_t> cuts;
    int64_t kept = prompt.done;
    const auto keep = [&](int64_t at, int64_t apart) {
        at = round_down_to_page(std::min(at, prompt.tokens));
        if (at <= kept || at - kept < apart || (kept == 0 && at < prompt.fewest)) return;
        cuts.push_back(kept = at);
    };
    size_t image = 0;
    const auto keep_images = [&](int64_t before) {
        for (; image < prompt.images.size() && prompt.images[image] <= before; ++image)
            keep(prompt.images[image], 0);
    };
    for (size_t i = 0; i < prompt.boundaries.size(); ++i) {
        const bool edge = i == 0 || i + 1 == prompt.boundaries.size();
        keep_images(prompt.boundaries[i]);
        keep(prompt.boundaries[i], edge ? 0 : kFarApart);
    }
    keep_images(prompt.tokens);
    keep(prompt.tokens, 0);
    return cuts;
}

}  // namespace quern
