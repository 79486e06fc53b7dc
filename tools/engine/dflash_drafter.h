// DflashDrafter: drafts by a DFlash drafter (models/dflash.h), a whole draft in one pass: of the newest token and masks after
// it, whose rows say which tokens they stand for.
//
// What it knows of committed tokens, its keys and values, is written by the model's own steps (Pass::taps), into the
// sequence's pages; a block reads only those before its first row. So entries of drafted tokens that were not taken are never
// seen, and kept states have theirs.
#pragma once

#include <memory>
#include <vector>

#include "tools/engine/drafter.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/step_inputs.h"

namespace quern {

class Backend;

class DflashDrafter final : public Drafter {
  public:
    /// All of the engine's; they outlive the drafter. Runs the passes for one sequence and for as many as share one, on states
    /// that nobody uses yet: throws Error if the backend cannot.
    DflashDrafter(const Model& model, Backend& backend, PlanCache& plans, const MemoryPlan& memory);

    const char* name() const override { return "dflash"; }
    void propose(std::span<Draft> drafts) override;
    std::span<const int32_t> late_tokens() override;
    bool drafts_ahead() const override { return true; }
    Plan* ready_ahead(const Slice& slice, int64_t most, DraftRows rows) override;
    void propose_ahead() override;
    void settle_ahead(int64_t length) override { ahead_length_ = length; }

    /// Whether rows of a block in layers with windows see none after them; only where the drafter's config does not say.
    void causal_windows(bool yes) { causal_windows_ = yes; }
    bool causal_windows() const { return causal_windows_; }

  private:
    InputRows block_of(const SequenceState& state, int64_t begin, int32_t first) const;
    void fill(std::span<Draft*> drafts);
    void read(const StepPlan& pass, std::span<Draft*> drafts);
    void send(const StepPlan& pass);
    StepPlan& plan(int64_t sequences, DraftRows rows, bool full_head = false);

    const Model& model_;
    Backend& backend_;
    PlanCache& plans_;
    const MemoryPlan& memory_;
    int64_t sequences_;               // of a pass, at most
    std::shared_ptr<void> ids_;       // of a pass, on the host
    bool late_ = false;               // whether the last draft is
    StepPlan* ahead_pass_ = nullptr;  // that is ready
    RequestId ahead_ = 0;             // of the sequence that it has drafted ahead for; 0: none
    int64_t ahead_length_ = -1;       // that the sequence has then; -1: unknown, or the draft is wrong
    bool causal_windows_ = true;
};

}  // namespace quern
