#include "ggml-like/cuda/upload.h"

#include <cstring>

#include "ggml-like/cuda/check_cuda.h"
#include "ggml-like/cuda/host_memory.h"

namespace quern::cuda {
namespace {

constexpr int64_t kAlignment = 256, kPiece = 1 << 20;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Uploader::Uploader(cudaStream_t stream, int threads) : stream_(stream), pool_(threads) {}

Uploader::~Uploader() {
    for (Buffer& b : buffers_) {
        if (b.done != nullptr) cudaEventDestroy(b.done);
        free_host(b.host);
        cudaFree(b.device);
    }
}

void Uploader::open() {
    const auto size = static_cast<size_t>(kCapacity + 4 * kAlignment);
    for (Buffer& b : buffers_) {
        b.host = static_cast<std::byte*>(alloc_host(static_cast<int64_t>(size), "upload buffers"));
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&b.device), size));
        CUDA_CHECK(cudaEventCreateWithFlags(&b.done, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventRecord(b.done, stream_));
    }
}

const void* Uploader::queue(const void* from, int64_t bytes) {
    if (bytes == 0) return nullptr;
    Buffer& b = buffers_[now_];
    const auto* source = static_cast<const std::byte*>(from);
    for (int64_t at = 0; at < bytes; at += kPiece)
        pieces_.push_back({b.host + b.used + at, source + at, std::min(kPiece, bytes - at)});
    const void* device = b.device + b.used;
    b.used += aligned(bytes);
    return device;
}

void Uploader::rows(RawRows raw, int64_t value_bytes, int64_t nvfp4_scale_bytes, int64_t scale_bytes,
                    uint8_t* data, float* factor, int chunks) {
    if (buffers_[0].host == nullptr) open();
    const int64_t need = aligned(value_bytes) + aligned(nvfp4_scale_bytes) + aligned(scale_bytes);
    if (buffers_[now_].used + need > kCapacity + 4 * kAlignment) flush();
    raw.values = queue(raw.values, value_bytes);
    raw.nvfp4_scale = static_cast<const uint8_t*>(queue(raw.nvfp4_scale, nvfp4_scale_bytes));
    raw.scale = static_cast<const float*>(queue(raw.scale, scale_bytes));
    packs_.push_back([=, stream = stream_] { pack_rows(stream, raw, data, factor, chunks); });
}

void Uploader::flush() {
    Buffer& b = buffers_[now_];
    if (b.used == 0) return;
    pool_.parallel_for(static_cast<int64_t>(pieces_.size()), 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const Piece& p = pieces_[static_cast<size_t>(i)];
            std::memcpy(p.to, p.from, static_cast<size_t>(p.bytes));
        }
    });
    CUDA_CHECK(
        cudaMemcpyAsync(b.device, b.host, static_cast<size_t>(b.used), cudaMemcpyHostToDevice, stream_));
    for (const auto& pack : packs_) pack();
    CUDA_CHECK(cudaEventRecord(b.done, stream_));
    b.used = 0;
    pieces_.clear();
    packs_.clear();
    now_ ^= 1;
    CUDA_CHECK(cudaEventSynchronize(buffers_[now_].done));
}

void Uploader::finish() {
    flush();
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (Buffer& b : buffers_) {
        if (b.done != nullptr) cudaEventDestroy(b.done);
        free_host(b.host);
        cudaFree(b.device);
        b = {};
    }
}

}  // namespace quern::cuda
