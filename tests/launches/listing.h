// What people ask for: the launches of steps as text, to read, and to compare before and after a change. The text has no
// addresses, no paths and no order that changes.
#pragma once

#include <string>

#include "launches/step_list.h"

namespace quern::test {

/// A line a node: its name, each launch, and why there are no more, if one was refused.
std::string launches_text(PlacedModel& model, const BatchShape& step);
/// A line a step of every model on every device: kernels, a hash of launches_text, and what is refused first.
std::string steps_text();
/// A line a kernel: the rows of the steps that launch it, on each device; then the kernels that none does.
std::string kernels_text();

}  // namespace quern::test
