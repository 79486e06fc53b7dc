// PlanCache: one plan for each batch shape. Those for repeated use are kept; of the others the least recently used
// is dropped when there are too many.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "ggml-like/plan.h"
#include "models/model.h"

namespace quern {

/// Rows of an answer step at most, where plans are captured. Each number of sequences with one row has a plan of its own: a row more
/// takes 1 % of a step and more.
inline constexpr int64_t kMaxAnswerRows = 64;
/// The same of a model whose rows choose so many experts each: a step has at most 512 of these choices (ops/moe_gate_up.h).
constexpr int64_t most_answer_rows(int64_t experts_used) {
    int64_t rows = kMaxAnswerRows;
    while (rows > 1 && rows * experts_used > 512) rows /= 2;
    return rows;
}
/// Steps that verify drafts and passes that draft would need too many plans: beyond this, their numbers are padded.
inline constexpr int64_t kMaxUnpadded = 8;

/// What so many sequences are padded to: their number, or the next power of two.
int64_t padded_sequences(int64_t sequences);
/// The next larger one of these numbers.
constexpr int64_t next_padded(int64_t n) { return n < kMaxUnpadded ? n + 1 : 2 * n; }
/// The shape of an answer step of one row for each of so many sequences.
BatchShape decode_shape(int64_t sequences, int64_t pages, int64_t vocab);

/// The shape of an answer step that verifies drafts, padded from `shape`, which has drafts in its rows: at most `rows` rows,
/// all of them with logits.
BatchShape verify_shape(const BatchShape& shape, int64_t rows);

/// The shape of an answer pass of the MTP layer, padded from `shape`: at most `rows` rows. Unless each sequence has one row, they
/// are more than the sequences that these are padded to, which fewer than half of `rows` rows always allow.
BatchShape draft_shape(const BatchShape& shape, int64_t rows);

/// Whether it drafts for one sequence and leaves no logits. Such passes have a workspace of their own: they
/// are queued while the inputs of the step before may still be read, and the step after them is queued likewise.
bool drafts_alone(const BatchShape& shape);

/// Bytes of a plan's memory: scratch and outputs; inputs.
struct ScratchSize {
    int64_t arena, inputs;
};

/// What a stage other than the first runs of a step.
struct StagePlan {
    std::vector<Tensor*> arriving, leaving;  // BuiltGraph's
    std::unique_ptr<Plan> plan;
};

/// What a rank other than the first runs of a step.
struct RankPlan {
    Tensor *logits, *top;
    std::unique_ptr<Plan> plan;
};

/// A plan with the tensors that the engine fills and reads. With several ranks these are rank 0's; with several stages inputs are
/// the first one's, logits and top the last one's. Passes that draft are rank 0's or the last stage's alone.
struct StepPlan {
    BatchShape shape;
    Batch batch;
    Tensor* logits;
    Tensor* top;
    Tensor *next_ids, *next_source;  // BuiltGraph's
    MtpTensors mtp;                  // BuiltGraph's
    std::unique_ptr<Plan> plan;
    Backend* backend;              // of all ranks or stages
    Backend* device;               // that `plan` runs on
    std::vector<RankPlan> others;  // rank 1 and up; none of passes that draft, which rank 0 runs alone
    std::vector<Tensor*> leaving;  // of the first of several stages
    std::vector<StagePlan> later;  // stage 1 and up
    int64_t runs = 0;

    /// Every rank's plan, with the inputs of rank 0's; or each stage's in turn.
    void run();
    /// As Plan::run_before, on a device alone.
    void run_before(Plan& next);
    /// A pass that drafts, or catches up, whose results nobody waits for before other inputs are filled.
    void run_pass() { plan->run_marked(); }
    /// Call before the inputs are filled: those of what ran before may still be on their way.
    void await_inputs();
    /// Kernels that one run launches, in all stages; of ranks those of the first. 0: unknown.
    int64_t kernels() const;

  private:
    void run_later();
};

/// The pool's state as a rank other than the first has it.
class RankState final : public StateViews {
  public:
    RankState(const StateViews& state, const Backend& backend, int rank)
        : state_(state), backend_(backend), rank_(rank) {}
    Tensor find(int layer, StateRole role) const override;
    bool has(int layer, StateRole role) const override { return state_.has(layer, role); }

  private:
    const StateViews& state_;
    const Backend& backend_;
    int rank_;
};

class PlanCache {
  public:
    /// `workspace`: rank 0's or the first stage's; other ranks and stages get one of the same size each, or later stages these.
    /// `drafting`: for passes that draft alone; null: they have no other.
    PlanCache(const Model& model, Backend& backend, const StateViews& state, Workspace& workspace,
              size_t capacity, const std::vector<ScratchSize>& later_stages = {},
              Workspace* drafting = nullptr);

    /// PlanUse::repeatedly: the plan is never dropped.
    StepPlan& get(const BatchShape& shape, PlanUse use);

  private:
    struct Rank {
        RankState state;
        std::unique_ptr<Workspace> workspace;
    };

    StepPlan make(const BatchShape& shape, PlanUse use) const;
    void make_stages(StepPlan& step, PlanUse use) const;
    void make_first(StepPlan& step, PlanUse use) const;
    void make_drafting(StepPlan& step, PlanUse use) const;
    void make_own(StepPlan& step, PlanUse use, const Model& model, Backend& device,
                  Workspace& workspace) const;
    RankPlan make_other(const BatchShape& shape, PlanUse use, int rank) const;

    const Model& model_;
    Backend& backend_;
    const StateViews& state_;
    Workspace& workspace_;
    Workspace* drafting_;
    size_t capacity_;
    std::vector<Rank> others_;                       // rank 1 and up
    std::vector<std::unique_ptr<Workspace>> later_;  // of stage 1 and up
    std::list<StepPlan> kept_;
    std::list<StepPlan> plans_;  // newest first
};

}  // namespace quern
