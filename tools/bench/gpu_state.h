// Whether a measurement on a GPU can be trusted: throttled clocks, other programs on it.
#pragma once

#include <string>

namespace quern {

/// What disturbs measurements now, by nvidia-smi: reasons such as "power cap, 2 processes"; "": nothing; "unknown": it
/// cannot be asked. `bus_id`: the PCI address, such as "00000000:1B:00.0". Takes up to a second.
std::string gpu_taint(const std::string& bus_id);

/// The same from the output of nvidia-smi: the mask of clock event reasons ("0x0000000000000004"), and a line for each
/// process on the GPU.
std::string taint_of(const std::string& reasons, const std::string& processes);

}  // namespace quern
