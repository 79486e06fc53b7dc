// The state of an NVIDIA card, asked of the driver's management library (NVML), which is loaded at run time: a machine
// without it can run everything else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace quern {

/// What the driver knows; a field that it does not know for this card is empty.
struct CardState {
    std::string name;
    std::optional<uint64_t> ecc_corrected, ecc_uncorrected;  // errors of memory since the driver was loaded
    std::optional<unsigned> sm_clock, max_sm_clock;          // MHz, now and at most
    std::optional<unsigned> memory_clock, max_memory_clock;  // MHz
    std::optional<unsigned> bus_bits;                        // width of the memory's bus
    std::optional<unsigned> pcie_width, max_pcie_width;      // lanes
    std::optional<unsigned> pcie_generation, max_pcie_generation;
    std::optional<unsigned> celsius;
    std::optional<uint64_t> slowdowns;  // mask of NVML's clock event reasons

    /// Bytes a second that the memory can move, both edges of its clock; 0 if unknown.
    double memory_speed() const;
};

/// NVML's clock event reasons that spoil a measurement; idle, clocks that were set, and displays do not.
inline constexpr uint64_t kPowerCap = 0x04, kHardwareSlowdown = 0x08, kSyncBoost = 0x10,
                          kThermalSlowdown = 0x20, kHardwareThermalSlowdown = 0x40, kPowerBrake = 0x80;
/// Their names in `mask`, "power cap, power brake"; empty: none.
std::string clock_reasons(uint64_t mask);

struct CardAnswer {
    std::optional<CardState> state;
    std::string problem;  // why there is no state
};

/// `bus_id`: as Backend::bus_id(). `library`: the file to load. Never throws.
CardAnswer ask_card(const std::string& bus_id, const char* library = "libnvidia-ml.so.1");

}  // namespace quern
