// ReplayDrafter: drafts from answers that are known already, as good or bad as asked for. Shows what a drafter of that
// quality would gain, on any machine and before it exists.
#pragma once

#include <map>
#include <vector>

#include "tools/engine/drafter.h"

namespace quern {

class ReplayDrafter final : public Drafter {
  public:
    /// `acceptance`: by position in a draft, the share of an answer's drafts in which it and all before it are right; falling,
    /// each from 0 to 1. A draft has no more positions than that. Drafts of an answer are as right as that on average: how
    /// far the next one is right does not follow from chance, but from the golden ratio (Kronecker's sequence), so that few
    /// rounds come close, and repetitions are equal.
    explicit ReplayDrafter(std::vector<double> acceptance, uint64_t seed = 0)
        : acceptance_(std::move(acceptance)), seed_(seed) {}

    /// The answer that requests with this prompt will get.
    void expect(std::vector<int32_t> prompt, std::vector<int32_t> answer) {
        answers_[std::move(prompt)] = std::move(answer);
    }

    const char* name() const override { return "replay"; }
    void propose(std::span<Draft> drafts) override;
    void release(const Sequence& s) override { rounds_.erase(s.id); }

  private:
    size_t right_tokens(const Sequence& s);

    std::vector<double> acceptance_;
    uint64_t seed_;
    std::map<std::vector<int32_t>, std::vector<int32_t>> answers_;
    std::map<RequestId, int64_t> rounds_;  // with drafts, so far
};

}  // namespace quern
