#include "ggml-like/cuda/comm/peer_group.h"

#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"
#include "ggml-like/cuda/comm/all_reduce.h"

namespace quern::cuda::comm {
namespace {

/// A step may wait for another rank's host, which may be making a plan.
constexpr uint64_t kPatience = 30'000'000'000;

}  // namespace

PeerGroup::PeerGroup(const std::vector<int>& devices, Link link)
    : devices_(devices), boxes_(devices, link), peers_(devices.size()), contexts_(devices.size(), nullptr) {
    void* watch = nullptr;
    CUDA_CHECK(cudaHostAlloc(&watch, sizeof(Watch), cudaHostAllocPortable | cudaHostAllocMapped));
    watch_ = static_cast<Watch*>(watch);
    const BoxLayout layout = boxes_.layout();
    for (int r = 0; r < ranks(); ++r) {
        CUDA_CHECK(cudaSetDevice(devices_[static_cast<size_t>(r)]));
        void *progress = nullptr, *seen = nullptr;
        CUDA_CHECK(cudaMalloc(&progress, sizeof(Progress)));
        CUDA_CHECK(cudaHostGetDevicePointer(&seen, watch_, 0));
        Peers& own = peers_[static_cast<size_t>(r)];
        own.rank = r;
        own.ranks = ranks();
        for (int other = 0; other < ranks(); ++other) own.box[other] = boxes_.of(other);
        own.chunks_at = layout.small_bytes();
        own.flags_at = layout.flags_at();
        own.lines_at = layout.lines_at();
        own.row_bytes = row_bytes(ranks());
        own.own = static_cast<Progress*>(progress);
        own.watch = static_cast<volatile Watch*>(seen);
        own.patience = kPatience;
    }
    clear();
}

PeerGroup::~PeerGroup() {
    for (int r = 0; r < ranks(); ++r) {
        cudaSetDevice(devices_[static_cast<size_t>(r)]);
        cudaDeviceSynchronize();
    }
    for (const Peers& p : peers_) cudaFree(p.own);
    cudaFreeHost(watch_);
    cudaSetDevice(devices_[0]);
}

/// As if no message had been sent yet. Kernels of a step that failed may still run: first they end, which they do as long as the
/// host's word stands.
void PeerGroup::clear() {
    for (const int device : devices_) {
        CUDA_CHECK(cudaSetDevice(device));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    std::memset(watch_, 0, sizeof *watch_);
    for (int r = 0; r < ranks(); ++r) {
        CUDA_CHECK(cudaSetDevice(devices_[static_cast<size_t>(r)]));
        CUDA_CHECK(cudaMemset(peers_[static_cast<size_t>(r)].own, 0, sizeof(Progress)));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    boxes_.clear();
    CUDA_CHECK(cudaSetDevice(devices_[0]));
    aborted_ = false;
}

void PeerGroup::all_reduce(int rank, const float* part, float* sum, int64_t count) {
    Context* context = contexts_[static_cast<size_t>(rank)];
    CHECK(context != nullptr, "[all_reduce] rank {} has no backend yet", rank);
    comm::all_reduce(*context, part, sum, count);
}

/// Kernels that wait look at the word some thousand times a second.
void PeerGroup::abort() {
    __atomic_store_n(&watch_->abort, 1u, __ATOMIC_SEQ_CST);
    aborted_ = true;
}

void PeerGroup::begin_step() {
    if (aborted_) clear();
}

void PeerGroup::check(int rank) const {
    if (!lost(rank)) return;
    if (__atomic_load_n(&watch_->abort, __ATOMIC_SEQ_CST) != 0)
        FAIL(device, "[all_reduce] another rank of this model has failed");
    FAIL(device, "[all_reduce] GPU {} waited {} s in vain for the sums of the others",
         devices_[static_cast<size_t>(rank)],
         static_cast<double>(peers_[static_cast<size_t>(rank)].patience) / 1e9);
}

bool PeerGroup::lost(int rank) const { return __atomic_load_n(&watch_->lost[rank], __ATOMIC_SEQ_CST) != 0; }

uint64_t PeerGroup::set_patience(uint64_t nanoseconds) {
    const uint64_t before = peers_[0].patience;
    for (Peers& p : peers_) p.patience = nanoseconds;
    return before;
}

cudaStream_t PeerGroup::use_stream(int rank) const {
    CUDA_CHECK(cudaSetDevice(devices_[static_cast<size_t>(rank)]));
    return contexts_[static_cast<size_t>(rank)]->stream;
}

}  // namespace quern::cuda::comm
