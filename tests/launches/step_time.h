// What the host costs an answer step: how long the stand-in's device waits for the next one.
#pragma once

#include <string>
#include <vector>

namespace quern::test {

/// A table: microseconds that the device is idle between two answer steps of the 35B, for each number of sequences, when
/// only tokens are chosen, when they are read as text, and when a server hands them to its clients' threads.
std::string step_time_text(const std::vector<int64_t>& sequences);

}  // namespace quern::test
