#include "tools/common/nvml.h"

#include <dlfcn.h>

#include <array>
#include <memory>
#include <utility>

#include <fmt/format.h>

namespace quern {
namespace {

// The part of NVML's interface that is used (NVIDIA Management Library API Reference). 0 is success.
using Device = void*;
enum ClockType { kSm = 1, kMemory = 2 };
enum EccError { kCorrected = 0, kUncorrected = 1 };
constexpr int kVolatile = 0, kGpuSensor = 0;

class Library {
  public:
    explicit Library(const char* file) : handle_(::dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) return;
        const auto init = find<int()>("nvmlInit_v2");
        ready_ = init != nullptr && init() == 0;
    }
    ~Library() {
        if (ready_)
            if (const auto shutdown = find<int()>("nvmlShutdown")) shutdown();
        if (handle_ != nullptr) ::dlclose(handle_);
    }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    bool loaded() const { return handle_ != nullptr; }
    bool ready() const { return ready_; }
    template <typename F>
    F* find(const char* name) const {
        return reinterpret_cast<F*>(::dlsym(handle_, name));
    }

  private:
    void* handle_;
    bool ready_ = false;
};

/// What `name` writes through its last argument; nothing if it is missing or fails.
template <typename T, typename... Args>
std::optional<T> ask(const Library& nvml, const char* name, Device device, Args... args) {
    const auto function = nvml.find<int(Device, Args..., T*)>(name);
    T value{};
    if (function == nullptr || function(device, args..., &value) != 0) return {};
    return value;
}

CardState read_state(const Library& nvml, Device device) {
    CardState s;
    std::array<char, 96> name{};
    const auto get_name = nvml.find<int(Device, char*, unsigned)>("nvmlDeviceGetName");
    if (get_name != nullptr && get_name(device, name.data(), name.size() - 1) == 0) s.name = name.data();
    using Count = unsigned long long;
    s.ecc_corrected = ask<Count>(nvml, "nvmlDeviceGetTotalEccErrors", device, int{kCorrected}, kVolatile);
    s.ecc_uncorrected = ask<Count>(nvml, "nvmlDeviceGetTotalEccErrors", device, int{kUncorrected}, kVolatile);
    s.sm_clock = ask<unsigned>(nvml, "nvmlDeviceGetClockInfo", device, int{kSm});
    s.max_sm_clock = ask<unsigned>(nvml, "nvmlDeviceGetMaxClockInfo", device, int{kSm});
    s.memory_clock = ask<unsigned>(nvml, "nvmlDeviceGetClockInfo", device, int{kMemory});
    s.max_memory_clock = ask<unsigned>(nvml, "nvmlDeviceGetMaxClockInfo", device, int{kMemory});
    s.bus_bits = ask<unsigned>(nvml, "nvmlDeviceGetMemoryBusWidth", device);
    s.pcie_width = ask<unsigned>(nvml, "nvmlDeviceGetCurrPcieLinkWidth", device);
    s.max_pcie_width = ask<unsigned>(nvml, "nvmlDeviceGetMaxPcieLinkWidth", device);
    s.pcie_generation = ask<unsigned>(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", device);
    s.max_pcie_generation = ask<unsigned>(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", device);
    s.celsius = ask<unsigned>(nvml, "nvmlDeviceGetTemperature", device, kGpuSensor);
    s.slowdowns = ask<Count>(nvml, "nvmlDeviceGetCurrentClocksEventReasons", device);
    if (!s.slowdowns)  // drivers before 535
        s.slowdowns = ask<Count>(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", device);
    return s;
}

}  // namespace

double CardState::memory_speed() const {
    if (!max_memory_clock || !bus_bits) return 0;
    return 2e6 * static_cast<double>(*max_memory_clock) * static_cast<double>(*bus_bits) / 8;
}

std::string clock_reasons(uint64_t mask) {
    constexpr std::pair<uint64_t, const char*> kReasons[] = {
        {kPowerCap, "power cap"},
        {kHardwareSlowdown, "hardware slowdown"},
        {kSyncBoost, "sync boost"},
        {kThermalSlowdown, "thermal slowdown"},
        {kHardwareThermalSlowdown, "hardware thermal slowdown"},
        {kPowerBrake, "power brake"}};
    std::string text;
    for (const auto& [bit, name] : kReasons)
        if ((mask & bit) != 0) text += (text.empty() ? "" : ", ") + std::string(name);
    return text;
}

CardAnswer ask_card(const std::string& bus_id, const char* library) {
    const Library nvml(library);
    if (!nvml.loaded()) return {{}, fmt::format("the driver's library {} is not there", library)};
    if (!nvml.ready()) return {{}, fmt::format("{} cannot be initialized", library)};
    const auto find = nvml.find<int(const char*, Device*)>("nvmlDeviceGetHandleByPciBusId_v2");
    Device device = nullptr;
    if (find == nullptr || find(bus_id.c_str(), &device) != 0)
        return {{}, fmt::format("{} knows no card at '{}'", library, bus_id)};
    return {read_state(nvml, device), {}};
}

}  // namespace quern
