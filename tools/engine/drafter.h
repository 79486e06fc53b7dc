// Drafter: guesses the next tokens of an answer. The engine verifies a guess in one answer step and takes what the
// model itself would have chosen, so a drafter decides how fast an answer comes and never what it says.
//
// A round: prepare -> propose -> an answer step with the drafted rows -> computed -> the engine commits the rows whose tokens
// the model chose -> accept. All other steps: prepare -> computed -> accept. Drafters hold what they know of committed tokens only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/engine/sequence.h"

namespace quern {

struct Step;
struct StepPlan;

/// A guess for one sequence.
struct Draft {
    const Sequence* sequence;
    int64_t most;  // tokens at most, at least 1
    std::vector<int32_t> tokens =
        {};  // that may follow sequence->tokens; fewer than `most`, or none, if unsure

    /// Whether drafters of this kind may still fill it: none has, and the request allows it.
    bool open_to(DrafterKind kind) const {
        return tokens.empty() && allows(sequence->request.drafts.kind, kind);
    }
};

class Drafter {
  public:
    virtual ~Drafter() = default;
    /// As in --spec.
    virtual const char* name() const = 0;
    /// A step will run, of sequences of which some may be new here; what is committed of them is in their states.
    virtual void prepare(const Step&) {}
    /// Fills the tokens of drafts that are open to it: ids that the model may sample, or nothing. The sequences have pages for
    /// all tokens that they may get.
    virtual void propose(std::span<Draft> drafts) = 0;
    /// A step has run, and its results can be read; what will be committed of it is not known yet.
    virtual void computed(const Step&, const StepPlan&) {}
    /// These sequences' tokens up to state.length are committed. After every step, with those that go on; may run plans.
    virtual void accept(std::span<Sequence* const>) {}
    /// The sequence has ended: forgets it. Unknown ones are ignored.
    virtual void release(const Sequence&) {}
};

}  // namespace quern
