// Steps that a device refuses today. A row goes when its steps run: the test of all steps fails then.
#pragma once

#include <string>

#include "launches/placed_model.h"

namespace quern::test {

/// A part of what the step's error says; empty: the step should run.
std::string known_refusal(const PlacedModel& model, const BatchShape& step);

}  // namespace quern::test
