// What the doctor says of a card's state.
#pragma once

#include "tools/common/doctor/diagnosis.h"
#include "tools/common/nvml.h"

namespace quern {

void judge_card(const CardState& state, CheckReport& report);
/// Bytes a second: measured, and what the memory could do (0: unknown).
void judge_copy_speed(double speed, double possible, CheckReport& report);

}  // namespace quern
