// MtpDrafter: drafts by the checkpoint's own layer for multi-token prediction, which guesses the token after the next one from
// the model's hidden state and the next token; applied to its own output it guesses further ones.
//
// Of a sequence of tokens x with hidden states h, the layer's row at position p reads h[p] and x[p + 1]. Its keys and values
// are in the sequence's pages, beside the model's. They hold committed positions only, but the last: that one depends on the
// token after it, so it is written when a draft begins, by whoever knows that token. Entries of drafted tokens are written
// over. The model's steps leave h in a ring of the slot (models/model.h: kHiddenRing), and steps of prompts write the layer's
// keys and values, too. A kept state has the ring with it, for its last position.
//
// All tokens of a draft come from one pass: the positions that the last step committed, then each further token from the one
// before, without a word to the host in between.
// Source: DeepSeek-V3 (2024), section 2.2, with one layer that is applied repeatedly.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/engine/drafter.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/step_inputs.h"

namespace quern {

class MtpDrafter final : public Drafter {
  public:
    /// All of the engine's; they outlive the drafter. Runs every kind of pass once, on states that nobody uses yet: throws Error
    /// if the backend cannot draft for a single sequence.
    MtpDrafter(const Model& model, Backend& backend, PlanCache& plans, const MemoryPlan& memory,
               int64_t draft_max);

    const char* name() const override { return "mtp"; }
    void prepare(const Step& step) override;
    void propose(std::span<Draft> drafts) override;
    std::span<const int32_t> late_tokens() override;
    bool drafts_ahead() const override { return true; }
    Plan* ready_ahead(const Slice& slice, int64_t most, DraftRows rows) override;
    void propose_ahead() override;
    void settle_ahead(int64_t length) override { ahead_length_ = length; }
    void computed(const Step& step, const StepPlan& plan) override;
    void accept(std::span<Sequence* const> sequences) override;
    void release(const Sequence& s) override { entries_.erase(s.id); }

  private:
    /// Positions of a sequence that get keys and values; the draft that begins after them, if any does.
    struct Rows {
        SequenceState state;
        int64_t begin;
        std::vector<int32_t> next;  // the tokens after the positions
        Draft* draft = nullptr;
        const PromptImages* images = nullptr;
        int64_t late = 0;      // so many of `next`, from the first on, are in StateRole::drafts
        bool follows = false;  // only as many rows count as the last step has found right
    };

    Rows rows_of(const Sequence& s, int64_t end) const;
    void shorten(std::vector<Rows>& list);
    void catch_up(const std::vector<Rows>& list);
    void draft(std::span<const Rows> list, bool watched);
    void read_drafts(std::span<const Rows> list, const StepPlan& plan, bool watched);
    StepPlan& filled(StepKind kind, std::span<const Rows> list, int64_t drafts, DraftRows rows,
                     bool full_head);
    StepPlan& run(StepKind kind, std::span<const Rows> list, int64_t drafts,
                  DraftRows rows = DraftRows::frequent, bool full_head = false);
    bool take_ahead(std::span<Draft> drafts);
    void send(const StepPlan& pass);
    void fill(StepPlan& plan, std::span<const Rows> list) const;
    void try_out();

    const Model& model_;
    Backend& backend_;
    PlanCache& plans_;
    StepLimits limits_;
    int64_t sequences_, pages_, draft_max_;
    int64_t draft_rows_ = 0;                // sequences that one pass drafts for
    std::map<RequestId, int64_t> entries_;  // positions with keys and values
    std::shared_ptr<void> ids_;             // of a pass's drafts, on the host
    int64_t late_ = 0;                      // tokens of the last draft, if it is late
    StepPlan* ahead_pass_ = nullptr;        // that is ready
    RequestId ahead_ = 0;                   // of the sequence that it has drafted ahead for; 0: none
    int64_t ahead_tokens_ = 0;              // of that draft
    int64_t ahead_length_ = -1;             // that the sequence has then; -1: unknown, or the draft is wrong
};

}  // namespace quern
