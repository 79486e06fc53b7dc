// Drafter: guesses the next tokens of an answer. The engine verifies a guess in one answer step and takes what the
// model itself would have chosen, so a drafter decides how fast an answer comes and never what it says.
//
// A round: prepare -> propose -> an answer step with the drafted rows -> computed -> the engine commits the rows whose tokens
// the model chose -> accept. All other steps: prepare -> computed -> accept. Drafters hold what they know of committed tokens only.
//
// A drafter may leave its tokens on the device (Draft::late): the step that verifies them reads them there and is queued at
// once, and the host learns of them while it runs. It may even draft ahead, after what this step will choose: the pass is queued
// behind the step, and was for nothing if that chooses otherwise than by the highest logit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/engine/sequence.h"

namespace quern {

struct Slice;
struct Step;
struct StepPlan;

/// A guess for one sequence.
struct Draft {
    const Sequence* sequence;
    int64_t most;  // tokens at most, at least 1
    std::vector<int32_t> tokens =
        {};  // that may follow sequence->tokens; fewer than `most`, or none, if unsure
    /// In place of tokens: so many are on the device only, at the beginning of StateRole::drafts.
    int64_t late = 0;
    bool ahead = false;        // they were drafted ahead
    bool may_be_late = false;  // it is its step's only one, and one device has the whole model
    /// Of the head, that it should be chosen from (draft_rows.h).
    DraftRows rows = DraftRows::frequent;
    /// If a pass chose it from a head, and did not do so ahead: the rows that the pass read.
    std::optional<DraftRows> read = {};
    bool leads = false;  // the first draft of such a pass

    /// Whether drafters of this kind may still fill it: none has, and the request allows it.
    bool open_to(DrafterKind kind) const {
        return tokens.empty() && late == 0 && allows(sequence->request.drafts.kind, kind);
    }
    /// Whether somebody looks at the drafts themselves: then they are those of the model's own head, and never late.
    bool watched() const { return sequence->request.on_draft_logits || sequence->request.on_round; }
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
    /// Waits for the late draft of the last proposal and returns its tokens, if there is one. Call when the step that verifies it is
    /// queued.
    virtual std::span<const int32_t> late_tokens() { return {}; }
    /// Whether it can draft ahead, after a step that verifies its draft of this one sequence.
    virtual bool drafts_ahead() const { return false; }
    /// Readies a pass that drafts `most` tokens ahead, from these rows of the head, before the step with this slice is queued.
    /// Its plan, whose inputs are to be uploaded with the step's; null: there is none.
    virtual Plan* ready_ahead(const Slice&, [[maybe_unused]] int64_t most, DraftRows) { return nullptr; }
    /// Queues it, behind the step and after late_tokens().
    virtual void propose_ahead() {}
    /// The step has ended, and the sequence now has so many tokens in its state and one more, as StateRole::chosen says: the
    /// next proposal for it then is what was drafted ahead. -1: it has others.
    virtual void settle_ahead([[maybe_unused]] int64_t length) {}
    /// A step has run, and its results can be read; what will be committed of it is not known yet.
    virtual void computed(const Step&, const StepPlan&) {}
    /// These sequences' tokens up to state.length are committed. After every step, with those that go on; may run plans.
    virtual void accept(std::span<Sequence* const>) {}
    /// The sequence has ended: forgets it. Unknown ones are ignored.
    virtual void release(const Sequence&) {}
};

}  // namespace quern
