// An event of the CUDA runtime that belongs to somebody.
#pragma once

#include <cuda_runtime_api.h>

#include "ggml-like/cuda/check_cuda.h"

namespace quern::cuda {

/// Of the device that is this thread's when it is made. Throws Error(device).
class Event {
  public:
    Event() { CUDA_CHECK(cudaEventCreate(&event_)); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t get() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;
};

}  // namespace quern::cuda
