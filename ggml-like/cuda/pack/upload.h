// Uploader: raw weights from host memory (a mapped file) through pinned buffers to the packing kernel.
//
//     threads copy       | buffer 0 | buffer 1 | buffer 2 | buffer 3 | buffer 0 ...
//     device copies                 | buffer 0 | buffer 1 | buffer 2 | ...
//     kernel packs                             | buffer 0 | buffer 1 | ...
//
// Copies and kernels have a stream each; a buffer is filled again once it has been packed.
#pragma once

#include <cstddef>
#include <vector>

#include "ggml-like/cpu/thread_pool.h"
#include "ggml-like/cuda/pack/pack.h"

namespace quern::cuda::pack {

class Uploader {
  public:
    Uploader(cudaStream_t stream, int threads);
    ~Uploader();
    Uploader(const Uploader&) = delete;
    Uploader& operator=(const Uploader&) = delete;

    /// Bytes of one rows() call, at most.
    static constexpr int64_t kCapacity = 32ll << 20;

    /// Queues rows, of which `values` and scales are host addresses, with these sizes in bytes. They must stay until
    /// the next flush() or finish().
    void rows(RawRows raw, int64_t value_bytes, int64_t nvfp4_scale_bytes, int64_t scale_bytes, uint8_t* data,
              float* factor, int chunks);
    /// Sends what is queued. Throws Error(device).
    void flush();
    /// Sends what is queued, waits until all is packed, and frees the buffers.
    void finish();

  private:
    struct Piece {
        std::byte* to;
        const std::byte* from;
        int64_t bytes;
    };
    struct Buffer {
        std::byte *host = nullptr, *device = nullptr;
        cudaEvent_t copied = nullptr, packed = nullptr;
        int64_t used = 0;
    };
    static constexpr int kBuffers = 4;

    void open();
    void close();
    const void* queue(const void* from, int64_t bytes);

    cudaStream_t stream_, copies_ = nullptr;
    cpu::ThreadPool pool_;
    Buffer buffers_[kBuffers];
    int now_ = 0;
    std::vector<Piece> pieces_;
    std::vector<PackTask> tasks_;
    std::vector<int> task_of_;  // of each block
};

}  // namespace quern::cuda::pack
