// Whether a measurement on a GPU can be trusted: clocks held back, or other programs at work on it.
#pragma once

#include <string>

namespace quern {

/// What spoils measurements right now, by nvidia-smi: "" nothing, "unknown" if it cannot be asked, else
/// reasons, as "power cap, 2 processes". `bus_id`: the PCI address, as "00000000:1B:00.0". Takes up to a
/// second.
std::string gpu_taint(const std::string& bus_id);

/// The same from what nvidia-smi prints: the mask of clock event reasons ("0x0000000000000004"), and a line
/// for each process on the GPU.
std::string taint_of(const std::string& reasons, const std::string& processes);

}  // namespace quern
