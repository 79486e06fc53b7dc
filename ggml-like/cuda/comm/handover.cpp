#include "ggml-like/cuda/comm/handover.h"

#include <utility>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"

namespace quern::cuda::comm {
namespace {

void copy_rows(void* to, const void* from, const BlockCopy& c, cudaMemcpyKind kind, cudaStream_t stream) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(c.bytes), kind, stream));
}

}  // namespace

Handover::Handover(int device) : device_(device) {
    CUDA_CHECK(cudaEventCreateWithFlags(&sent_, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&received_, cudaEventDisableTiming));
}

Handover::~Handover() {
    cudaEventDestroy(sent_);
    cudaEventDestroy(received_);
    cudaFreeHost(mailbox_);
}

void Handover::receive(Handover& sender, cudaStream_t sender_stream, cudaStream_t own_stream,
                       std::span<const BlockCopy> list) {
    int64_t bytes = 0;
    for (const BlockCopy& c : list) {
        CHECK(c.count == 1, "[handover] {} blocks in one copy", c.count);
        bytes += c.bytes;
    }
    if (!directly_) enlarge(bytes, own_stream);
    CUDA_CHECK(cudaSetDevice(sender.device_));
    if (!directly_) {
        // The mailbox is empty by then: the sender's stream waits until the last rows were received.
        std::byte* at = mailbox_;
        for (const BlockCopy& c : list) {
            copy_rows(at, c.from, c, cudaMemcpyDeviceToHost, sender_stream);
            at += c.bytes;
        }
    }
    CUDA_CHECK(cudaEventRecord(sender.sent_, sender_stream));
    CUDA_CHECK(cudaSetDevice(device_));
    CUDA_CHECK(cudaStreamWaitEvent(own_stream, sender.sent_, 0));
    const std::byte* at = mailbox_;
    for (const BlockCopy& c : list) {
        copy_rows(c.to, directly_ ? c.from : at, c,
                  directly_ ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice, own_stream);
        if (!directly_) at += c.bytes;
    }
    CUDA_CHECK(cudaEventRecord(received_, own_stream));
    CUDA_CHECK(cudaStreamWaitEvent(sender_stream, received_, 0));
}

void Handover::enlarge(int64_t bytes, cudaStream_t own_stream) {
    if (bytes <= mailbox_bytes_) return;
    CUDA_CHECK(cudaStreamSynchronize(own_stream));
    CUDA_CHECK(cudaFreeHost(std::exchange(mailbox_, nullptr)));
    mailbox_bytes_ = 0;
    void* memory = nullptr;
    if (cudaMallocHost(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
        cudaGetLastError();
        FAIL(memory, "not enough memory: {} bytes, pinned, for rows from one GPU to another", bytes);
    }
    mailbox_ = static_cast<std::byte*>(memory);
    mailbox_bytes_ = bytes;
}

bool enable_reading(int to, int from) {
    int possible = 0;
    CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, to, from));
    if (possible == 0) return false;
    CUDA_CHECK(cudaSetDevice(to));
    const cudaError_t code = cudaDeviceEnablePeerAccess(from, 0);
    cudaGetLastError();
    return code == cudaSuccess || code == cudaErrorPeerAccessAlreadyEnabled;
}

}  // namespace quern::cuda::comm
