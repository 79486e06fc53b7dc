// Uploader: raw weights from host memory (a mapped file) through pinned buffers to the packing kernel. While
// threads fill one buffer, those before it are on their way to the device or are packed there: a stream for
// copies, a stream for kernels, and a buffer is filled again when it has been packed.
#pragma once

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

    /// Most bytes of one rows() call.
    static constexpr int64_t kCapacity = 32ll << 20;

    /// Queues rows whose `values` and scales are host addresses, of these sizes in bytes.
    void rows(RawRows raw, int64_t value_bytes, int64_t nvfp4_scale_bytes, int64_t scale_bytes, uint8_t* data,
              float* factor, int chunks);
    /// Sends what is queued.
    void flush();
    /// Sends, waits, and gives the buffers back.
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
