#include "ggml-like/cuda/pack/state_copies.h"

#include "ggml-like/cuda/check_cuda.h"
#include "ggml-like/cuda/pack/block_copies.h"
#include "ggml-like/cuda/pack/host_memory.h"

namespace quern::cuda::pack {

StateCopies::StateCopies(cudaStream_t stream, bool reads_registered)
    : stream_(stream), reads_registered_(reads_registered) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&saves_, cudaStreamNonBlocking));
}

StateCopies::~StateCopies() {
    cudaStreamSynchronize(saves_);
    cudaStreamDestroy(saves_);
}

void StateCopies::save(std::span<const BlockCopy> list) {
    CUDA_CHECK(cudaEventRecord(computed_.get(), stream_));
    CUDA_CHECK(cudaStreamWaitEvent(saves_, computed_.get(), 0));
    copy_blocks(list, cudaMemcpyDeviceToHost, saves_, reaches_host());
    CUDA_CHECK(cudaEventRecord(saved_.get(), saves_));
}

void StateCopies::order_after_saves() { CUDA_CHECK(cudaStreamWaitEvent(stream_, saved_.get(), 0)); }

void StateCopies::finish_saves() { CUDA_CHECK(cudaStreamSynchronize(saves_)); }

bool StateCopies::saves_ended() {
    const cudaError_t code = cudaStreamQuery(saves_);
    if (code == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    CUDA_CHECK(code);
    return true;
}

void StateCopies::load(std::span<const BlockCopy> list) {
    order_after_saves();
    copy_blocks(list, cudaMemcpyHostToDevice, stream_, reaches_host());
}

bool StateCopies::reaches_host() const { return reads_registered_ && all_pinned(); }

}  // namespace quern::cuda::pack
