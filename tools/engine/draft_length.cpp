#include "tools/engine/draft_length.h"

#include <algorithm>
#include <cmath>

namespace quern {
namespace {

constexpr double kExpected = 0.8;      // that a token is right, before any was drafted
constexpr double kExpectedWeight = 3;  // what is expected counts as much as so many trials
constexpr double kKept = 0.95;         // of what was learnt, after another draft
constexpr double kFaded = 0.998;       // after a step without one: half of it after 350 steps
/// So many steps later a cost may be another one: contexts have grown, other programs have come or gone.
constexpr int64_t kOld = 1000;
/// What a size must promise whose cost is not known, and is taken for that of a smaller one, to be tried: gain, and the
/// probability that its last token is right.
constexpr double kWorthTrying = 1.03, kLikely = 0.2;
/// Below this gain a draft is noise.
constexpr double kWorthwhile = 1.02;

}  // namespace

void AcceptanceRecord::add(int64_t drafted, int64_t accepted) {
    for (int64_t i = 0; i < std::min(drafted, accepted + 1); ++i) {
        Position& p = positions_[static_cast<size_t>(i)];
        p.tried = kKept * p.tried + 1;
        p.right = kKept * p.right + (i < accepted ? 1 : 0);
    }
}

void AcceptanceRecord::fade() {
    for (Position& p : positions_) {
        p.tried *= kFaded;
        p.right *= kFaded;
    }
}

AcceptanceRecord::Chances AcceptanceRecord::chances(const Chances& expected) const {
    Chances list;
    for (size_t i = 0; i < list.size(); ++i)
        list[i] =
            (positions_[i].right + expected[i] * kExpectedWeight) / (positions_[i].tried + kExpectedWeight);
    return list;
}

AcceptanceRecord::Chances AcceptanceRecord::chances() const {
    Chances expected;
    expected.fill(kExpected);
    return chances(expected);
}

void StepCosts::add(const StepSize& size, double seconds) {
    const auto [at, fresh] = costs_.try_emplace(size, Cost{seconds, ++steps_, 0});
    Cost& cost = at->second;
    cost.step = steps_;
    // Steps are never faster than they can be, but slower by accident.
    if (++cost.count == 2)
        cost.seconds = std::min(cost.seconds, seconds);
    else
        cost.seconds +=
            (seconds < cost.seconds ? 0.5 : 0.2) * (std::min(seconds, 1.5 * cost.seconds) - cost.seconds);
    if (fresh) std::erase_if(costs_, [&](const auto& c) { return old(c.second); });
}

bool StepCosts::knows(const StepSize& size) const {
    return std::any_of(costs_.lower_bound({size.sequences, size.rows}), costs_.upper_bound(size),
                       [&](const auto& c) { return sure(c.second); });
}

double StepCosts::seconds(const StepSize& size) const {
    const auto end = costs_.lower_bound({size.sequences + 1, 0});
    double cost = INFINITY;
    for (auto at = costs_.lower_bound({size.sequences, 0}); at != end; ++at) {
        const auto& [other, measured] = *at;
        if (old(measured) || other.draft_rows > size.draft_rows) continue;
        if (sure(measured) && other.rows <= size.rows)
            cost = measured.seconds;
        else if (other.draft_rows == size.draft_rows)
            cost = std::min(cost, measured.seconds);
    }
    return cost;
}

std::vector<SpeculationReport::Cost> StepCosts::list() const {
    std::vector<SpeculationReport::Cost> all;
    for (const auto& [size, cost] : costs_)
        all.push_back({size.sequences, size.rows, size.draft_rows, cost.seconds, sure(cost)});
    return all;
}

bool StepCosts::old(const Cost& cost) const { return cost.step < steps_ - kOld; }

/// Sizes that are tried: all small ones, then some a third apart.
int64_t next_size(int64_t tokens) { return tokens + std::max<int64_t>(1, tokens / 3); }

std::vector<int64_t> draft_lengths(std::span<const DraftCandidate> candidates, const StepCosts& costs,
                                   const StepSize& plain, int64_t answers, int64_t spare) {
    std::vector<int64_t> lengths(candidates.size(), 0);
    if (spare <= 0 || !costs.knows(plain)) return lengths;
    struct Gain {
        double chance;
        size_t candidate;
    };
    std::vector<Gain> gains;  // of each further drafted token
    for (size_t i = 0; i < candidates.size(); ++i) {
        double all = 1;  // that the draft is right up to here
        for (int64_t at = 0; at < std::min(candidates[i].most, kMaxDraft); ++at)
            gains.push_back({all *= candidates[i].chances[static_cast<size_t>(at)], i});
    }
    std::stable_sort(gains.begin(), gains.end(),
                     [](const Gain& a, const Gain& b) { return a.chance > b.chance; });
    gains.resize(std::min(gains.size(), static_cast<size_t>(std::max<int64_t>(spare, 0))));
    auto tokens = static_cast<double>(answers);
    double best = kWorthwhile * tokens / costs.seconds(plain);
    StepSize step = plain;
    const auto most = static_cast<int64_t>(gains.size());
    int64_t taken = 0, size = 1;
    for (int64_t i = 1; i <= most; ++i) {
        const auto& [chance, candidate] = gains[static_cast<size_t>(i - 1)];
        tokens += chance;
        ++step.rows;
        step.draft_rows = std::max(step.draft_rows, candidates[candidate].draft_rows);
        if (i < size && i < most) continue;
        size = next_size(i);
        const double rate = tokens / costs.seconds(step);
        const bool known = costs.knows(step);
        const bool likely = chance > kLikely;
        if (rate <= best * (known ? 1 : kWorthTrying) || (!known && !likely)) continue;
        best = rate;
        taken = i;
        if (!known) break;  // first this one, then larger ones
    }
    for (int64_t i = 0; i < taken; ++i) ++lengths[gains[static_cast<size_t>(i)].candidate];
    return lengths;
}

StepSize with_drafts(const StepSize& plain, std::span<const DraftCandidate> candidates,
                     std::span<const int64_t> lengths) {
    StepSize step = plain;
    for (size_t i = 0; i < candidates.size(); ++i) {
        step.rows += lengths[i];
        if (lengths[i] > 0) step.draft_rows = std::max(step.draft_rows, candidates[i].draft_rows);
    }
    return step;
}

double expected_tokens(std::span<const DraftCandidate> candidates, std::span<const int64_t> lengths,
                       int64_t sequences) {
    auto tokens = static_cast<double>(sequences);
    for (size_t i = 0; i < candidates.size(); ++i) {
        double all = 1;
        for (int64_t at = 0; at < lengths[i]; ++at)
            tokens += all *= candidates[i].chances[static_cast<size_t>(at)];
    }
    return tokens;
}

}  // namespace quern
