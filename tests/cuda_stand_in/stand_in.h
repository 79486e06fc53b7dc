// A stand-in for the CUDA runtime library on machines without a GPU: it runs no kernels, and records which ones the CUDA
// backend launches. Memory is the host's and costs nothing until it is touched; streams run in order at once. What a GPU
// would refuse is refused, with a message that says why. Calls may come from several threads at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace quern::cuda_stand_in {

struct Device {
    const char* name;
    int major, minor;
    int sms;
    int64_t shared_bytes;  // of a block at most, static and dynamic together
    int capability() const { return major * 10 + minor; }
};
/// By number.
std::span<const Device> devices();
inline constexpr int kH200 = 0, kRtx5090 = 1, kA100 = 2;
inline constexpr int64_t kMostWindow = 128 << 20;  // of all of them

/// Whether devices can read each other's memory, where they ask for it; at first they can.
void allow_peers(bool allowed);

/// A kernel of the program: an instance, where it is a template.
struct Kernel {
    std::string name;    // without namespaces and parameters
    std::string symbol;  // mangled
};

struct Launch {
    const Kernel* kernel;
    uint3 grid, block;
    int64_t shared_bytes;  // dynamic
    bool programmatic;     // may start before its predecessor ends
    int64_t window;        // bytes of its access policy window, 0: none
};
bool operator==(const Launch& a, const Launch& b);
/// "name grid 132 block 256 shared 65536 programmatic window 4096"
std::string describe(const Launch& launch);

struct Record {
    std::vector<Launch> launches;
    std::vector<size_t> marks;  // launches that came before each recorded event
};
/// What came since the last call.
Record take_record();

/// A device that takes its time: each launched graph keeps it busy for so long, and a stream's synchronization waits for that.
struct Pace {
    double graph_seconds = 0;  // 0: everything has ended at once
    /// Called with what came to the host, in place of kernels that would have written it.
    std::function<void(void* to, size_t bytes)> after_download = {};
};
void set_pace(Pace pace);

struct DeviceTime {
    std::vector<double>
        idle_seconds;  // between the end of each graph and the next one's launch; 0: it was waiting
    int64_t graphs = 0;
};
/// Since the last call.
DeviceTime take_device_time();

/// As if no kernel had asked for more shared memory than 48 KB yet.
void forget_allowed_memory();

/// All kernels of the program, by name.
std::vector<const Kernel*> kernels();

}  // namespace quern::cuda_stand_in
