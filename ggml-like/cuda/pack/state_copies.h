// States of sequences on their way between a device and the host: saves beside what the device computes, loads before it.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "ggml-like/backend.h"
#include "ggml-like/cuda/event.h"

namespace quern::cuda::pack {

/// Of one device, whose kernels run in `stream`. The calls are those of Backend. All throw Error(device), but the destructor,
/// which waits for saves.
class StateCopies {
  public:
    /// `reads_registered`: the device reaches registered memory of the host at the host's addresses.
    StateCopies(cudaStream_t stream, bool reads_registered);
    ~StateCopies();
    StateCopies(const StateCopies&) = delete;
    StateCopies& operator=(const StateCopies&) = delete;

    void save(std::span<const BlockCopy> list);
    void order_after_saves();
    void finish_saves();
    bool saves_ended();
    void load(std::span<const BlockCopy> list);
    /// Whether kernels may read and write what alloc_host has given.
    bool reaches_host() const;

  private:
    cudaStream_t stream_, saves_ = nullptr;
    Event computed_, saved_;  // the work before the last save, and that save
    bool reads_registered_;
};

}  // namespace quern::cuda::pack
