// PlanCache: one plan a batch shape, built on first use; the least recently used goes when there are too
// many.
#pragma once

#include <list>
#include <memory>

#include "ggml-like/plan.h"
#include "models/model.h"

namespace quern {

/// A plan with the tensors that the engine fills and reads.
struct StepPlan {
    BatchShape shape;
    Batch batch;
    Tensor* logits;
    Tensor* top;
    std::unique_ptr<Plan> plan;
};

class PlanCache {
  public:
    PlanCache(const Model& model, Backend& backend, const StateViews& state, size_t capacity)
        : model_(model), backend_(backend), state_(state), capacity_(capacity) {}

    StepPlan& get(const BatchShape& shape);
    int64_t bytes() const;

  private:
    const Model& model_;
    Backend& backend_;
    const StateViews& state_;
    size_t capacity_;
    std::list<StepPlan> plans_;  // newest first
};

}  // namespace quern
