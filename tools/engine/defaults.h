// What a request gets when nobody said otherwise: the checkpoint's sampling values, and a seed.
#pragma once

#include <cstdint>

#include "tools/engine/request.h"

namespace quern {

class Model;

/// Values of generation_config.json; what it leaves out stays neutral, and do_sample: false is greedy. The
/// presets that model cards give for answers without thinking are in no file and are not applied. Throws
/// Error(model) for a value outside of its range.
Sampling default_sampling(const Model& model);

/// From the system's entropy; fits a signed 32-bit number so that it can be typed again anywhere.
uint64_t random_seed();
/// The seed that somebody asked for: a random one for kRandomSeed.
uint64_t seed_of(int64_t given);

}  // namespace quern
