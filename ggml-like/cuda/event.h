// An event of the CUDA runtime that belongs to somebody.
#pragma once

#include <cuda_runtime_api.h>

#include "ggml-like/cuda/check_cuda.h"

namespace quern::cuda {

/// Of the device that is this thread's when it is made; for order, not for times. Throws Error(device).
class Event {
  public:
    Event() : Event(cudaEventDisableTiming) {}
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t get() const { return event_; }

  protected:
    explicit Event(unsigned flags) { CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags)); }

  private:
    cudaEvent_t event_ = nullptr;
};

/// One that also keeps the time.
struct TimedEvent : Event {
    TimedEvent() : Event(cudaEventDefault) {}
};

}  // namespace quern::cuda
