// fill_inputs: what a step reads that differs from the last one.
#pragma once

#include <vector>

#include "tools/engine/plan_cache.h"
#include "tools/engine/scheduler.h"

namespace quern {

/// Writes ids, positions, slots, pages and temperatures of the slices' rows into the inputs of the plan, in
/// the order of the slices; the plan's shape has room for all of them.
void fill_inputs(StepPlan& step, const std::vector<Slice>& slices);

}  // namespace quern
