// How much memory of the machine is left.
#pragma once

#include <cstdint>

namespace quern {

/// Bytes that this process can take without swapping or being ended: of the machine, and of the control group (v2) that it
/// runs in. What could be read of neither: no limit.
int64_t host_memory_left();

}  // namespace quern
