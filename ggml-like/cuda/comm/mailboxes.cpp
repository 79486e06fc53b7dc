#include "ggml-like/cuda/comm/mailboxes.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"

namespace quern::cuda::comm {

std::string no_peer_access(const std::vector<int>& devices) {
    for (const int device : devices)
        for (const int other : devices) {
            if (other == device) continue;
            int possible = 0;
            CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, device, other));
            if (possible == 0)
                return fmt::format("GPU {} cannot write into the memory of GPU {}", device, other);
        }
    return {};
}

void require_one_kind(const std::vector<int>& devices) {
    std::vector<std::string> names;
    for (const int device : devices) {
        cudaDeviceProp properties{};
        CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
        names.emplace_back(properties.name);
    }
    require_one_kind(devices, names);
}

void require_one_kind(const std::vector<int>& devices, const std::vector<std::string>& names) {
    for (size_t i = 1; i < names.size(); ++i)
        if (names[i] != names[0])
            FAIL(device,
                 "GPU {} is an {} and GPU {} an {}; with -tp a model needs cards of one kind, which round "
                 "alike: choose them with --device",
                 devices[0], names[0], devices[i], names[i]);
}

Mailboxes::Mailboxes(const std::vector<int>& devices, Link link) : devices_(devices), link_(link) {
    if (devices.size() > kMaxRanks)
        FAIL(device, "a model runs on {} GPUs at most, not {}", kMaxRanks, devices.size());
    if (link == Link::peer_access) enable_access();
    const auto bytes = static_cast<size_t>(layout().bytes());
    for (const int device : devices_) {
        CUDA_CHECK(cudaSetDevice(device));
        void* box = nullptr;
        if (link == Link::peer_access)
            CUDA_CHECK(cudaMalloc(&box, bytes));
        else
            CUDA_CHECK(cudaHostAlloc(&box, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
        boxes_.push_back(static_cast<std::byte*>(box));
    }
    CUDA_CHECK(cudaSetDevice(devices_[0]));
}

Mailboxes::~Mailboxes() {
    for (std::byte* box : boxes_) {
        if (link_ == Link::peer_access)
            cudaFree(box);
        else
            cudaFreeHost(box);
    }
}

void Mailboxes::clear() {
    const auto bytes = static_cast<size_t>(layout().bytes());
    for (size_t i = 0; i < boxes_.size(); ++i) {
        if (link_ == Link::host_memory) {
            std::memset(boxes_[i], 0, bytes);
            continue;
        }
        CUDA_CHECK(cudaSetDevice(devices_[i]));
        CUDA_CHECK(cudaMemset(boxes_[i], 0, bytes));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    CUDA_CHECK(cudaSetDevice(devices_[0]));
}

void Mailboxes::enable_access() const {
    for (const int device : devices_) {
        CUDA_CHECK(cudaSetDevice(device));
        for (const int other : devices_) {
            if (other == device) continue;
            const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
            if (code == cudaErrorPeerAccessAlreadyEnabled)
                cudaGetLastError();
            else
                CUDA_CHECK(code);
        }
    }
}

}  // namespace quern::cuda::comm
