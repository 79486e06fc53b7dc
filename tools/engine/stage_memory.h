// The memory plan of a model that several devices hold by layers.
#pragma once

#include "tools/engine/memory_plan.h"

namespace quern {

/// As make_memory_plan, whose `stages` are then the plans of the devices, and all else their sums. The device with the least
/// room decides how long a context is and how many states are kept.
MemoryPlan plan_stages(const Model& model, const Backend& backend, const EngineOptions& options,
                       bool weights_placed);

}  // namespace quern
