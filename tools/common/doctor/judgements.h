// What measured numbers mean: verdicts apart from any model and any card.
#pragma once

#include "tools/common/doctor/diagnosis.h"
#include "tools/common/doctor/expert_load.h"
#include "tools/common/nvml.h"

namespace quern {

/// `tokens` were traced, each of which chose `used` experts. Wrong: a layer that does not route. Note: many experts that
/// are never chosen, one that takes most tokens.
void judge_experts(const ExpertLoad& load, int64_t tokens, int64_t used, CheckReport& report);
/// Wrong: the first layer with activations that are not finite, or near the end of BF16 and FP32. Note: beyond F16.
void judge_activations(const ModelTrace& trace, CheckReport& report);
/// Mean entropy of the next token and that of a uniform choice, nats. Wrong: nearly uniform, or nearly none.
void judge_entropy(double mean, double uniform, CheckReport& report);

void judge_card(const CardState& state, CheckReport& report);
/// Bytes a second: measured, and what the memory could do (0: unknown).
void judge_copy_speed(double speed, double possible, CheckReport& report);
/// Adds what was found of card `number` of `count`, from 1 on.
void add_card(int number, int count, const CheckReport& card, CheckReport& report);

}  // namespace quern
