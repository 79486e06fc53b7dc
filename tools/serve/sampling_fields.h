// Fields of a request about sampling.
#pragma once

#include <cstdint>

#include "tools/common/fields.h"
#include "tools/engine/request.h"

namespace quern {

/// Changes in `s` what the request names. If it names no seed, `s` gets a random one, unless `fixed_seed`. `vocab`:
/// token ids that logit_bias may name are below it. Throws FieldError.
void read_sampling(Fields& fields, Sampling& s, bool fixed_seed, int64_t vocab);

/// The number that is written as shortly as the float: 0.3, not 0.30000001192092896.
double as_written(float value);

}  // namespace quern
