// Drafter: guesses the next tokens of an answer. The engine verifies a guess in one answer step and takes what the
// model itself would have chosen, so a drafter decides how fast an answer comes and never what it says.
//
// A round: propose -> an answer step with the drafted rows -> the engine commits the rows whose tokens the model chose ->
// accept. Drafters hold what they know of committed tokens only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/engine/sequence.h"

namespace quern {

/// A guess for one sequence.
struct Draft {
    const Sequence* sequence;
    int64_t most;  // tokens at most, at least 1
    std::vector<int32_t> tokens =
        {};  // that may follow sequence->tokens; fewer than `most`, or none, if unsure
};

class Drafter {
  public:
    virtual ~Drafter() = default;
    /// As in --spec.
    virtual const char* name() const = 0;
    /// Fills the tokens of each draft: ids that the model may sample, or nothing.
    virtual void propose(std::span<Draft> drafts) = 0;
    /// The sequence's tokens up to state.length are committed; called after every step that verified its draft.
    virtual void accept(const Sequence& s) = 0;
    /// The sequence has ended: forgets it. Unknown ones are ignored.
    virtual void release(const Sequence& s) = 0;
};

}  // namespace quern
