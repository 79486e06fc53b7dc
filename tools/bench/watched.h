// A measurement, and a look at the device that it ran on.
#pragma once

#include <string>

#include "tools/bench/measure.h"

namespace quern {

/// run_test. `taint`: what gpu_taint says of the device while it goes on afterwards, since idle clocks say nothing; left as it
/// is without a device.
Samples run_watched(Engine& engine, const BenchTest& test, int repetitions, ReplayDrafter* drafter,
                    std::string& taint);

}  // namespace quern
