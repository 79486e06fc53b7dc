#include "tools/engine/draft_length.h"

#include <algorithm>
#include <cmath>

namespace quern {
namespace {

/// Nothing is known of a new sequence but that drafters draft what is likely: an imagined trial.
constexpr double kExpected = 0.8, kExpectedWeight = 1;
constexpr double kKept = 0.95;    // of what was learnt, after another draft
constexpr double kFaded = 0.998;  // after a step without one: half of it after 350 steps
/// So many steps later a cost may be another one: contexts have grown, other programs have come or gone.
constexpr int64_t kOld = 1000;
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

std::vector<double> AcceptanceRecord::chances(int64_t most) const {
    std::vector<double> list;
    double all = 1;
    for (int64_t i = 0; i < std::min(most, kMaxDraft); ++i) {
        const Position& p = positions_[static_cast<size_t>(i)];
        all *= (p.right + kExpected * kExpectedWeight) / (p.tried + kExpectedWeight);
        list.push_back(all);
    }
    return list;
}

void StepCosts::add(int64_t sequences, int64_t rows, double seconds) {
    ++steps_;
    const auto [at, fresh] = costs_.try_emplace({sequences, rows}, Cost{seconds, steps_});
    Cost& cost = at->second;
    cost.step = steps_;
    if (fresh) return forget_old();
    // Steps are never faster than they can be, but slower by accident.
    const double weight = seconds < cost.seconds ? 0.5 : 0.2;
    cost.seconds += weight * (std::min(seconds, 1.5 * cost.seconds) - cost.seconds);
}

void StepCosts::forget_old() {
    std::erase_if(costs_, [&](const auto& c) { return c.second.step < steps_ - kOld; });
}

bool StepCosts::knows(int64_t sequences, int64_t rows) const {
    const auto at = costs_.find({sequences, rows});
    return at != costs_.end() && at->second.step >= steps_ - kOld;
}

double StepCosts::seconds(int64_t sequences, int64_t rows) const {
    const auto old = [&](const auto& c) { return c.second.step < steps_ - kOld; };
    auto above = costs_.lower_bound({sequences, rows});
    while (above != costs_.end() && old(*above)) ++above;
    if (above != costs_.end() && above->first == Key{sequences, rows}) return above->second.seconds;
    auto below = costs_.lower_bound({sequences, rows});
    do {
        if (below == costs_.begin()) return above->second.seconds;
        --below;
    } while (old(*below));
    const bool between = above != costs_.end() && above->first.first == sequences;
    if (below->first.first != sequences) return between ? above->second.seconds : below->second.seconds;
    if (!between) return below->second.seconds;
    const auto [low, high] = std::pair{below->first.second, above->first.second};
    const double part = static_cast<double>(rows - low) / static_cast<double>(high - low);
    return std::lerp(below->second.seconds, above->second.seconds, part);
}

std::vector<int64_t> draft_lengths(std::span<const DraftCandidate> candidates, const StepCosts& costs,
                                   int64_t sequences, int64_t rows, int64_t spare) {
    std::vector<int64_t> lengths(candidates.size(), 0);
    if (!costs.knows(sequences, rows)) return lengths;
    struct Gain {
        double chance;
        size_t candidate;
    };
    std::vector<Gain> gains;  // of each further drafted token
    for (size_t i = 0; i < candidates.size(); ++i)
        for (const double chance : candidates[i].record->chances(candidates[i].most))
            gains.push_back({chance, i});
    std::stable_sort(gains.begin(), gains.end(),
                     [](const Gain& a, const Gain& b) { return a.chance > b.chance; });
    gains.resize(std::min(gains.size(), static_cast<size_t>(std::max<int64_t>(spare, 0))));
    double tokens = static_cast<double>(sequences);
    double best = kWorthwhile * tokens / costs.seconds(sequences, rows);
    size_t taken = 0;
    for (size_t i = 0; i < gains.size(); ++i) {
        tokens += gains[i].chance;
        const double rate = tokens / costs.seconds(sequences, rows + static_cast<int64_t>(i) + 1);
        if (rate <= best) continue;
        best = rate;
        taken = i + 1;
    }
    for (size_t i = 0; i < taken; ++i) ++lengths[gains[i].candidate];
    return lengths;
}

}  // namespace quern
