// fill_inputs: all that changes from step to step.
#pragma once

#include <vector>

#include "tools/engine/plan_cache.h"
#include "tools/engine/scheduler.h"

namespace quern {

/// Writes ids, positions, slots, pages and temperatures of the slices' rows, in order, into the inputs of the plan,
/// whose shape has room for all of them.
void fill_inputs(StepPlan& step, const std::vector<Slice>& slices);

}  // namespace quern
