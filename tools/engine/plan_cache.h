// PlanCache: one plan for each batch shape. Those for repeated use are kept; of the others the least recently used
// is dropped when there are too many.
#pragma once

#include <list>
#include <memory>

#include "ggml-like/plan.h"
#include "models/model.h"

namespace quern {

/// Rows of an answer step at most, where plans are captured. Steps of one row a sequence are padded to a few sizes,
/// each of which has a captured plan.
inline constexpr int64_t kMaxAnswerRows = 64;
/// Up to this many sequences are not padded: a padding row would cost up to 10 % of the step.
inline constexpr int64_t kMaxUnpadded = 8;

/// The size that a step of so many sequences is padded to: their number, or the next power of two.
int64_t decode_bucket(int64_t sequences);
/// The next larger size.
constexpr int64_t next_bucket(int64_t bucket) { return bucket < kMaxUnpadded ? bucket + 1 : 2 * bucket; }
/// The shape of an answer step of one row for each of `bucket` sequences.
BatchShape decode_shape(int64_t bucket, int64_t pages, int64_t vocab);

/// The shape of an answer step that verifies drafts, padded from `shape`, which has drafts in its rows: at most `rows` rows,
/// all of them with logits.
BatchShape verify_shape(const BatchShape& shape, int64_t rows);

/// The shape of an answer pass of the MTP layer, padded from `shape`: at most `rows` rows. Unless each sequence has one row, they
/// are more than the sequences that these are padded to, which fewer than half of `rows` rows always allow.
BatchShape draft_shape(const BatchShape& shape, int64_t rows);

/// A plan with the tensors that the engine fills and reads.
struct StepPlan {
    BatchShape shape;
    Batch batch;
    Tensor* logits;
    Tensor* top;
    Tensor *next_ids, *next_source;  // BuiltGraph's
    MtpTensors mtp;                  // BuiltGraph's
    std::unique_ptr<Plan> plan;
    int64_t runs = 0;
};

class PlanCache {
  public:
    PlanCache(const Model& model, Backend& backend, const StateViews& state, Workspace& workspace,
              size_t capacity)
        : model_(model), backend_(backend), state_(state), workspace_(workspace), capacity_(capacity) {}

    /// PlanUse::repeatedly: the plan is never dropped.
    StepPlan& get(const BatchShape& shape, PlanUse use);

  private:
    StepPlan make(const BatchShape& shape, PlanUse use) const;

    const Model& model_;
    Backend& backend_;
    const StateViews& state_;
    Workspace& workspace_;
    size_t capacity_;
    std::list<StepPlan> kept_;
    std::list<StepPlan> plans_;  // newest first
};

}  // namespace quern
