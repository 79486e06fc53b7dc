// Handover: rows from one GPU to the next, where each has some of a model's layers.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "ggml-like/backend.h"

namespace quern::cuda::comm {

/// Of one device, which is the thread's when it is made and when it receives.
class Handover {
  public:
    explicit Handover(int device);
    ~Handover();
    Handover(const Handover&) = delete;
    Handover& operator=(const Handover&) = delete;

    /// Whether this device reads the sender's memory; else, as at first, rows go through pinned host memory.
    void read_directly(bool directly) { directly_ = directly; }
    /// As Backend::receive, from the device of `sender` and the work queued on its stream to this one and its stream. Throws
    /// Error(memory) without pinned memory.
    void receive(Handover& sender, cudaStream_t sender_stream, cudaStream_t own_stream,
                 std::span<const BlockCopy> list);

  private:
    void enlarge(int64_t bytes, cudaStream_t own_stream);

    const int device_;
    bool directly_ = false;
    cudaEvent_t sent_ = nullptr, received_ = nullptr;
    std::byte* mailbox_ = nullptr;  // pinned
    int64_t mailbox_bytes_ = 0;
};

/// Lets GPU `to` read the memory of GPU `from`. False: it cannot.
bool enable_reading(int to, int from);

}  // namespace quern::cuda::comm
