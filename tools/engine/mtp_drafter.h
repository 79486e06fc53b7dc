// MtpDrafter: drafts by the checkpoint's own layer for multi-token prediction, which guesses the token after the next one from
// the model's hidden state and the next token; applied to its own output it guesses further ones.
//
// Of a sequence of tokens x with hidden states h, the layer's row at position p reads h[p] and x[p + 1]. Its keys and values
// are in the sequence's pages, beside the model's. They hold committed positions only, but the last: that one depends on the
// token after it, so it is written when a draft begins, by whoever knows that token. Entries of drafted tokens are written
// over. What it takes to go on from a kept state, the last token's hidden state, is in the slot.
//
// Hidden states pass through host memory, where they are normed; of a prompt they are 4 * width bytes a token.
// Source: DeepSeek-V3 (2024), section 2.2, with one layer that is applied repeatedly.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/engine/drafter.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/state_pool.h"
#include "tools/engine/step_inputs.h"

namespace quern {

class MtpDrafter final : public Drafter {
  public:
    /// All of the engine's; they outlive the drafter. Runs every kind of pass once, on states that nobody uses yet: throws Error
    /// if the backend cannot draft for a single sequence.
    MtpDrafter(const Model& model, Backend& backend, const StatePool& pool, PlanCache& plans,
               const MemoryPlan& memory);

    const char* name() const override { return "mtp"; }
    void propose(std::span<Draft> drafts) override;
    void computed(const Step& step, const StepPlan& plan) override;
    void accept(std::span<Sequence* const> sequences) override;
    void release(const Sequence& s) override { known_.erase(s.id); }

  private:
    /// What is known of a sequence.
    struct Known {
        int64_t entries = 0;        // positions with keys and values
        std::vector<float> hidden;  // hidden states of the committed positions from there on
        int64_t step_row = 0;       // the first row of its last step
    };
    /// Positions of a sequence that get keys and values.
    struct CatchUp {
        SequenceState state;
        int64_t begin;
        std::vector<int32_t> tokens;       // those after the positions
        std::vector<const float*> hidden;  // of the positions
        std::vector<float> memory = {};    // of some of them
    };
    struct Guess {
        Draft* draft;
        std::vector<float> hidden;
        int32_t token;
    };
    /// Rows of one pass.
    struct Rows {
        std::vector<InputRows> inputs;
        std::vector<const float*> hidden;  // one a row
    };

    Known& known(const Sequence& s, int64_t begin);
    void prompt_computed(const Slice& slice, Known& k);
    CatchUp catch_up_of(const Sequence& s, const Known& k, int64_t count) const;
    void catch_up(StepKind kind, const std::vector<CatchUp>& list);
    void guess(std::span<Guess> guesses, int64_t step);
    StepPlan& run(StepKind kind, const Rows& rows, Pass from, bool logits);
    void fill_hidden(StepPlan& plan, const std::vector<const float*>& rows, Pass from) const;
    const float* step_hidden(int64_t row) const {
        return static_cast<float*>(step_hidden_.get()) + row * width_;
    }
    std::byte* kept_hidden(const Sequence& s) const;
    void try_out();

    const Model& model_;
    Backend& backend_;
    PlanCache& plans_;
    StepLimits limits_;
    int64_t sequences_, pages_, width_;
    int64_t draft_rows_ = 0;             // sequences that one pass drafts for
    Tensor kept_;                        // StateRole::hidden
    std::shared_ptr<void> step_hidden_;  // F32 [rows, width] of the last step, on the host
    std::map<RequestId, Known> known_;
    std::vector<CatchUp> prompts_;  // of the last step
};

}  // namespace quern
