// LookupDrafter: what followed the same words before. Finds the longest earlier occurrence of the last tokens in the
// prompt and the answer, and drafts what came after it. Needs no weights.
//
// Matches shorter than kFewestMatched tokens are chance more often than repetition. Occurrences are found by hash chains,
// as in LZ77: constant time for each token. Source of the idea: Saxena 2023, prompt lookup decoding.
#pragma once

#include <map>

#include "tools/engine/drafter.h"

namespace quern {

/// Where each run of kFewestMatched tokens occurred in a growing list of tokens.
class TokenIndex {
  public:
    static constexpr size_t kFewestMatched = 8;

    /// Adds the runs of `tokens` that end beyond those of the last call; `tokens` begins with what it was then.
    void extend(std::span<const int32_t> tokens);
    /// The end of the longest earlier occurrence of the last tokens, of equal ones the latest; 0: there is none. The index
    /// must have been extended to these tokens.
    size_t find(std::span<const int32_t> tokens) const;

  private:
    size_t bucket(std::span<const int32_t> tokens, size_t end) const;
    void grow(std::span<const int32_t> tokens);

    std::vector<int32_t> newest_;    // by bucket: the end of the newest run; 0: none
    std::vector<int32_t> previous_;  // by end of a run: that of the run before it in the same bucket
};

class LookupDrafter final : public Drafter {
  public:
    const char* name() const override { return "lookup"; }
    void propose(std::span<Draft> drafts) override;
    void release(const Sequence& s) override { indexes_.erase(s.id); }

  private:
    std::map<RequestId, TokenIndex> indexes_;
};

}  // namespace quern
