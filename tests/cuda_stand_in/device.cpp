#include "cuda_stand_in/device.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <utility>

#include "cuda_stand_in/errors.h"
#include "cuda_stand_in/kernels.h"
#include "cuda_stand_in/memory.h"

namespace quern::cuda_stand_in {
namespace {

constexpr int64_t kKilo = 1024;

// All say that they have much memory: a launch does not depend on it.
constexpr Device kDevices[] = {
    {.name = "like an H200", .major = 9, .minor = 0, .sms = 132, .shared_bytes = 227 * kKilo},
    {.name = "like an RTX 5090", .major = 12, .minor = 0, .sms = 170, .shared_bytes = 99 * kKilo},
    {.name = "like an A100", .major = 8, .minor = 0, .sms = 108, .shared_bytes = 163 * kKilo},
};

thread_local int current = 0;
std::mutex peers_mutex;  // of the next two
bool peers_allowed = true;
std::set<std::pair<int, int>> readers;  // a device, and the one whose memory it may read

bool exists(int number) { return number >= 0 && number < static_cast<int>(std::size(kDevices)); }

}  // namespace

std::span<const Device> devices() { return kDevices; }
int current_device() { return current; }
bool reads_peer(int peer) {
    const std::lock_guard lock(peers_mutex);
    return readers.contains({current, peer});
}
void allow_peers(bool allowed) {
    const std::lock_guard lock(peers_mutex);
    peers_allowed = allowed;
    readers.clear();
}

}  // namespace quern::cuda_stand_in

using namespace quern::cuda_stand_in;

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = static_cast<int>(devices().size());
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
    if (!exists(number)) return fail(cudaErrorInvalidDevice, "cudaSetDevice: there is no such device");
    current = number;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
    if (!exists(number))
        return fail(cudaErrorInvalidDevice, "cudaGetDeviceProperties: there is no such device");
    const Device& d = kDevices[number];
    *properties = {};
    std::snprintf(properties->name, sizeof(properties->name), "%s", d.name);
    properties->major = d.major;
    properties->minor = d.minor;
    properties->multiProcessorCount = d.sms;
    properties->sharedMemPerBlock = kPlainShared;
    properties->sharedMemPerBlockOptin = static_cast<size_t>(d.shared_bytes);
    properties->totalGlobalMem = static_cast<size_t>(kDeviceBytes);
    properties->pciBusID = number + 1;
    properties->accessPolicyMaxWindowSize = static_cast<int>(kMostWindow);
    properties->canUseHostPointerForRegisteredMem = 1;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    *total = static_cast<size_t>(kDeviceBytes);
    *available = *total - static_cast<size_t>(taken_bytes(current));
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaDeviceCanAccessPeer(int* possible, int device, int peer) {
    if (!exists(device) || !exists(peer))
        return fail(cudaErrorInvalidDevice, "cudaDeviceCanAccessPeer: there is no such device");
    const std::lock_guard lock(peers_mutex);
    *possible = peers_allowed && device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    const std::lock_guard lock(peers_mutex);
    if (!exists(peer) || peer == current || !peers_allowed)
        return fail(cudaErrorInvalidDevice, "cudaDeviceEnablePeerAccess: this is no other device");
    readers.insert({current, peer});
    return cudaSuccess;
}
