#include "ggml-like/cuda/pack/upload.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/cuda/check_cuda.h"
#include "ggml-like/cuda/pack/host_memory.h"

namespace quern::cuda::pack {
namespace {

constexpr int64_t kAlignment = 256, kPiece = 256 << 10;
constexpr int64_t kBehind =
    1 << 20;  // bytes of a buffer behind kCapacity: for alignment, tasks and the blocks' tasks

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <typename T>
int64_t bytes_of(const std::vector<T>& list) {
    return static_cast<int64_t>(list.size() * sizeof(T));
}

}  // namespace

Uploader::Uploader(cudaStream_t stream, int threads) : stream_(stream), pool_(threads) {}

Uploader::~Uploader() { close(); }

void Uploader::open() {
    const auto size = static_cast<size_t>(kCapacity + kBehind);
    CUDA_CHECK(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
    for (Buffer& b : buffers_) {
        b.host = static_cast<std::byte*>(alloc_host(static_cast<int64_t>(size), "upload buffers"));
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&b.device), size));
        CUDA_CHECK(cudaEventCreateWithFlags(&b.copied, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&b.packed, cudaEventDisableTiming));
    }
}

void Uploader::close() {
    for (Buffer& b : buffers_) {
        if (b.copied != nullptr) cudaEventDestroy(b.copied);
        if (b.packed != nullptr) cudaEventDestroy(b.packed);
        free_host(b.host);
        cudaFree(b.device);
        b = {};
    }
    if (copies_ != nullptr) cudaStreamDestroy(copies_);
    copies_ = nullptr;
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
    const auto blocks = static_cast<size_t>(pack_blocks(raw, chunks));
    const int64_t need = aligned(value_bytes) + aligned(nvfp4_scale_bytes) + aligned(scale_bytes) +
                         aligned(bytes_of(tasks_) + static_cast<int64_t>(sizeof(PackTask))) +
                         aligned(bytes_of(task_of_) + static_cast<int64_t>(blocks * sizeof(int)));
    if (buffers_[now_].used + need > kCapacity + kBehind) flush();
    raw.values = queue(raw.values, value_bytes);
    raw.nvfp4_scale = static_cast<const uint8_t*>(queue(raw.nvfp4_scale, nvfp4_scale_bytes));
    raw.scale = static_cast<const float*>(queue(raw.scale, scale_bytes));
    tasks_.push_back({raw, data, factor, chunks, static_cast<int>(task_of_.size())});
    task_of_.resize(task_of_.size() + blocks, static_cast<int>(tasks_.size()) - 1);
}

void Uploader::flush() {
    Buffer& b = buffers_[now_];
    if (b.used == 0) return;
    const auto* tasks = static_cast<const PackTask*>(queue(tasks_.data(), bytes_of(tasks_)));
    const auto* task_of = static_cast<const int*>(queue(task_of_.data(), bytes_of(task_of_)));
    pool_.parallel_for(static_cast<int64_t>(pieces_.size()), 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const Piece& p = pieces_[static_cast<size_t>(i)];
            std::memcpy(p.to, p.from, static_cast<size_t>(p.bytes));
        }
    });
    CUDA_CHECK(
        cudaMemcpyAsync(b.device, b.host, static_cast<size_t>(b.used), cudaMemcpyHostToDevice, copies_));
    CUDA_CHECK(cudaEventRecord(b.copied, copies_));
    CUDA_CHECK(cudaStreamWaitEvent(stream_, b.copied));
    pack_rows(stream_, tasks, task_of, static_cast<int>(task_of_.size()));
    CUDA_CHECK(cudaEventRecord(b.packed, stream_));
    b.used = 0;
    pieces_.clear();
    tasks_.clear();
    task_of_.clear();
    now_ = (now_ + 1) % kBuffers;
    CUDA_CHECK(cudaEventSynchronize(buffers_[now_].packed));
}

void Uploader::finish() {
    flush();
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    close();
}

}  // namespace quern::cuda::pack
