#include "tools/engine/plan_cache.h"

#include <algorithm>

namespace quern {

StepPlan& PlanCache::get(const BatchShape& shape) {
    const auto hit =
        std::find_if(plans_.begin(), plans_.end(), [&](const StepPlan& p) { return p.shape == shape; });
    if (hit != plans_.end()) {
        plans_.splice(plans_.begin(), plans_, hit);
        return plans_.front();
    }
    while (plans_.size() >= capacity_) plans_.pop_back();
    BuiltGraph built = model_.build(shape, state_, backend_.activation_dtype());
    plans_.push_front(
        {shape, built.batch, built.logits, built.top, std::make_unique<Plan>(std::move(built.graph), backend_)});
    return plans_.front();
}

int64_t PlanCache::bytes() const {
    int64_t total = 0;
    for (const StepPlan& p : plans_) total += p.plan->arena_bytes() + p.plan->input_bytes();
    return total;
}

}  // namespace quern
