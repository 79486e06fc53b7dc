// How long the stand-in's device is busy, for measurements of what the host does before and meanwhile.
#pragma once

#include <cstddef>

namespace quern::cuda_stand_in {

/// A graph is launched.
void begin_graph();
/// Returns when all graphs have ended.
void wait_for_graphs();
/// Bytes have come to the host.
void downloaded(void* to, size_t bytes);

}  // namespace quern::cuda_stand_in
