// How many tokens to draft, so that drafts never cost more than they bring: costs of steps and acceptance are measured
// while answers are written, and each round takes the lengths with the most tokens a second. Pure host code.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "models/model.h"
#include "tools/engine/speculation_options.h"
#include "tools/engine/speculation_report.h"

namespace quern {

/// How far drafts were right lately, of one sequence or of all. What was learnt fades with every step, so that drafts which
/// failed are tried again now and then.
class AcceptanceRecord {
  public:
    /// For each position of a draft, the probability that its token is right if those before it are.
    using Chances = std::array<double, kMaxDraft>;

    /// A draft of `drafted` tokens, of which the first `accepted` were right.
    void add(int64_t drafted, int64_t accepted);
    /// A step that could have had a draft.
    void fade();
    /// What is known, and where little is known, more or less `expected`.
    Chances chances(const Chances& expected) const;
    /// The same, expecting that drafters draft what is likely.
    Chances chances() const;

  private:
    struct Position {
        double tried = 0, right = 0;  // of those whose tokens before were right
    };
    std::array<Position, kMaxDraft> positions_{};
};

/// What the time of an answer step depends on.
struct StepSize {
    int64_t sequences, rows;  // sequences: their number, or what it is padded to
    /// Of the head, that the step's drafts are chosen from; of several drafts the most. Without drafts: frequent.
    DraftRows draft_rows = DraftRows::frequent;
    auto operator<=>(const StepSize&) const = default;
};

/// Seconds of answer steps by size, as measured.
class StepCosts {
  public:
    void add(const StepSize& size, double seconds);
    /// Whether this size was measured twice, since a single time may be an accident; with these rows of the head, or with fewer.
    bool knows(const StepSize& size) const;
    /// If it is only known with fewer rows of the head: what it takes with the most of these. For a size that is not known: what the
    /// next smaller one takes, likewise. Both are too little, so that what may be good is tried. Never more than what a larger one
    /// took with the same rows of the head. Infinite if no step of so many sequences was measured.
    double seconds(const StepSize& size) const;
    std::vector<SpeculationReport::Cost> list() const;

  private:
    struct Cost {
        double seconds;
        int64_t step;   // when it was measured last
        int64_t count;  // how often
    };
    bool old(const Cost& cost) const;
    bool sure(const Cost& cost) const { return cost.count > 1 && !old(cost); }

    std::map<StepSize, Cost> costs_;
    int64_t steps_ = 0;
};

/// A sequence that a draft may be made for.
struct DraftCandidate {
    AcceptanceRecord::Chances chances;
    int64_t most;  // tokens at most
    DraftRows draft_rows = DraftRows::frequent;
};

/// Tokens to draft for each candidate, 0 included: those with the best expected number of tokens a second in a step of `answers`
/// sequences, the candidates among them, that is of size `plain` without these drafts and has room for `spare` more rows. All 0 as
/// long as the cost of `plain` is unknown. Sizes whose cost is unknown are tried one after another, small ones first, as long as they
/// may be better than the best known.
std::vector<int64_t> draft_lengths(std::span<const DraftCandidate> candidates, const StepCosts& costs,
                                   const StepSize& plain, int64_t answers, int64_t spare);

/// The size of that step with drafts of these lengths.
StepSize with_drafts(const StepSize& plain, std::span<const DraftCandidate> candidates,
                     std::span<const int64_t> lengths);

/// Tokens that a step of `sequences` sequences with drafts of these lengths gives, on average.
double expected_tokens(std::span<const DraftCandidate> candidates, std::span<const int64_t> lengths,
                       int64_t sequences);

}  // namespace quern
