// What a request gets by default: the checkpoint's sampling values, and a seed.
#pragma once

#include <cstdint>

#include "tools/engine/request.h"

namespace quern {

class Model;

/// Values of generation_config.json; what it leaves out stays neutral, and do_sample: false is greedy. The presets
/// in model cards for answers without thinking are in no file, so they are not applied. Throws Error(model) for a
/// value outside its range.
Sampling default_sampling(const Model& model);

/// From the system's entropy; fits a signed 32-bit number, so that every program takes it.
uint64_t random_seed();
/// `given`, or a random seed for kRandomSeed.
uint64_t seed_of(int64_t given);

}  // namespace quern
