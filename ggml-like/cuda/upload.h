// Uploader: raw weights from host memory (a mapped file) through two pinned buffers to the packing kernels.
// While one buffer is on its way to the device and is packed there, threads fill the other.
#pragma once

#include <functional>
#include <vector>

#include "ggml-like/cpu/thread_pool.h"
#include "ggml-like/cuda/pack.h"

namespace quern::cuda {

class Uploader {
  public:
    Uploader(cudaStream_t stream, int threads);
    ~Uploader();
    Uploader(const Uploader&) = delete;
    Uploader& operator=(const Uploader&) = delete;

    /// Most bytes of one rows() call.
    static constexpr int64_t kCapacity = 64ll << 20;

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
        cudaEvent_t done = nullptr;
        int64_t used = 0;
    };

    void open();
    const void* queue(const void* from, int64_t bytes);

    cudaStream_t stream_;
    cpu::ThreadPool pool_;
    Buffer buffers_[2];
    int now_ = 0;
    std::vector<Piece> pieces_;
    std::vector<std::function<void()>> packs_;
};

}  // namespace quern::cuda
