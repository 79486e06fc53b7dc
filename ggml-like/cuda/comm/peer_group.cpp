#include "ggml-like/cuda/comm/peer_group.h"

#include <cstring>
#include <random>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"
#include "ggml-like/cuda/comm/all_reduce.h"

namespace quern::cuda::comm {
namespace {

/// A step may wait for another rank's host, which may be making a plan.
constexpr uint64_t kPatience = 30'000'000'000;
constexpr uint64_t kTestPatience = 2'000'000'000;

/// A vector on each rank's device, for a test.
class Vectors {
  public:
    Vectors(const std::vector<int>& devices, int64_t count) : devices_(devices) {
        for (const int device : devices) {
            CUDA_CHECK(cudaSetDevice(device));
            void* memory = nullptr;
            CUDA_CHECK(cudaMalloc(&memory, static_cast<size_t>(count) * sizeof(float)));
            memory_.push_back(memory);
        }
    }
    ~Vectors() {
        for (void* m : memory_) cudaFree(m);
    }
    Vectors(const Vectors&) = delete;
    Vectors& operator=(const Vectors&) = delete;

    float* of(int rank) const { return static_cast<float*>(memory_[static_cast<size_t>(rank)]); }

  private:
    const std::vector<int>& devices_;
    std::vector<void*> memory_;
};

std::vector<std::vector<float>> random_parts(int ranks, int64_t count) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::uniform_real_distribution<float> numbers(-1, 1);
    std::vector<std::vector<float>> parts(static_cast<size_t>(ranks));
    for (auto& part : parts) {
        part.resize(static_cast<size_t>(count));
        for (float& x : part) x = numbers(random);
    }
    return parts;
}

std::vector<float> sum_of(const std::vector<std::vector<float>>& parts) {
    std::vector<float> sum = parts[0];
    for (size_t r = 1; r < parts.size(); ++r)
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += parts[r][i];
    return sum;
}

}  // namespace

PeerGroup::PeerGroup(const std::vector<int>& devices)
    : devices_(devices), peers_(devices.size()), contexts_(devices.size(), nullptr) {
    if (ranks() > kMaxRanks) FAIL(device, "a model runs on {} GPUs at most, not {}", kMaxRanks, ranks());
    enable_access();
    void* watch = nullptr;
    CUDA_CHECK(cudaHostAlloc(&watch, sizeof(Watch), cudaHostAllocPortable | cudaHostAllocMapped));
    watch_ = static_cast<Watch*>(watch);
    std::memset(watch_, 0, sizeof *watch_);
    const BoxLayout layout{ranks()};
    for (int r = 0; r < ranks(); ++r) {
        CUDA_CHECK(cudaSetDevice(devices_[static_cast<size_t>(r)]));
        void *box = nullptr, *progress = nullptr, *seen = nullptr;
        CUDA_CHECK(cudaMalloc(&box, static_cast<size_t>(layout.bytes())));
        for (Peers& p : peers_) p.box[r] = static_cast<std::byte*>(box);
        CUDA_CHECK(cudaMalloc(&progress, sizeof(Progress)));
        CUDA_CHECK(cudaHostGetDevicePointer(&seen, watch_, 0));
        Peers& own = peers_[static_cast<size_t>(r)];
        own.rank = r;
        own.ranks = ranks();
        own.chunks_at = layout.small_bytes();
        own.flags_at = layout.flags_at();
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
    for (int r = 0; r < ranks(); ++r) {
        cudaFree(peers_[static_cast<size_t>(r)].box[r]);
        cudaFree(peers_[static_cast<size_t>(r)].own);
    }
    cudaFreeHost(watch_);
    cudaSetDevice(devices_[0]);
}

void PeerGroup::enable_access() const {
    cudaDeviceProp first{};
    CUDA_CHECK(cudaGetDeviceProperties(&first, devices_[0]));
    for (const int device : devices_) {
        cudaDeviceProp own{};
        CUDA_CHECK(cudaGetDeviceProperties(&own, device));
        if (std::strcmp(own.name, first.name) != 0)
            FAIL(device,
                 "GPU {} is an {} and GPU {} an {}; ranks of one model need cards of one kind, which round "
                 "alike",
                 devices_[0], first.name, device, own.name);
        CUDA_CHECK(cudaSetDevice(device));
        for (const int other : devices_) {
            if (other == device) continue;
            int possible = 0;
            CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, device, other));
            if (possible == 0)
                FAIL(device,
                     "GPU {} cannot write into the memory of GPU {} (no NVLink, or peer access over PCIe is "
                     "off); "
                     "run on one GPU, or choose others with --device",
                     device, other);
            const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
            if (code == cudaErrorPeerAccessAlreadyEnabled)
                cudaGetLastError();
            else
                CUDA_CHECK(code);
        }
    }
}

/// As if no message had been sent yet. Nothing may run.
void PeerGroup::clear() {
    std::memset(watch_, 0, sizeof *watch_);
    for (int r = 0; r < ranks(); ++r) {
        const Peers& p = peers_[static_cast<size_t>(r)];
        CUDA_CHECK(cudaSetDevice(devices_[static_cast<size_t>(r)]));
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemset(p.box[r], 0, static_cast<size_t>(BoxLayout{ranks()}.bytes())));
        CUDA_CHECK(cudaMemset(p.own, 0, sizeof(Progress)));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
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
    if (__atomic_load_n(&watch_->lost[rank], __ATOMIC_SEQ_CST) == 0) return;
    if (__atomic_load_n(&watch_->abort, __ATOMIC_SEQ_CST) != 0)
        FAIL(device, "[all_reduce] another rank of this model has failed");
    FAIL(device, "[all_reduce] GPU {} waited {} s in vain for the sums of the others",
         devices_[static_cast<size_t>(rank)],
         static_cast<double>(peers_[static_cast<size_t>(rank)].patience) / 1e9);
}

std::string PeerGroup::test() {
    for (Peers& p : peers_) p.patience = kTestPatience;
    // One block and many, all in one message and in two rounds, and what is no whole chunk.
    for (const int64_t count : {int64_t{16}, int64_t{2048}, int64_t{5120}, int64_t{131072}, 2 * kSmallPairs,
                                2 * kSmallPairs + 4, int64_t{1'500'004}})
        test_size(count);
    const double small = microseconds(2048), large = microseconds(2'097'152);
    for (Peers& p : peers_) p.patience = kPatience;
    return fmt::format("8 KB added up in {:.1f} us, 8 MB in {:.0f} us", small, large);
}

void PeerGroup::test_size(int64_t count) {
    constexpr int kTurns = 3;  // both places of a mailbox, one of them again
    const auto parts = random_parts(ranks(), count);
    const std::vector<float> expected = sum_of(parts);
    const Vectors part(devices_, count), sum(devices_, count);
    const size_t bytes = expected.size() * sizeof(float);
    for (int r = 0; r < ranks(); ++r) {
        const cudaStream_t stream = use_stream(r);
        CUDA_CHECK(cudaMemcpyAsync(part.of(r), parts[static_cast<size_t>(r)].data(), bytes,
                                   cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
    for (int turn = 0; turn < kTurns; ++turn) {
        for (int r = 0; r < ranks(); ++r) {
            CUDA_CHECK(cudaMemsetAsync(sum.of(r), 0xff, bytes, use_stream(r)));
            all_reduce(r, part.of(r), sum.of(r), count);
        }
        for (int r = 0; r < ranks(); ++r) compare(r, sum.of(r), expected);
    }
}

cudaStream_t PeerGroup::use_stream(int rank) const {
    CUDA_CHECK(cudaSetDevice(devices_[static_cast<size_t>(rank)]));
    return contexts_[static_cast<size_t>(rank)]->stream;
}

void PeerGroup::compare(int rank, const float* sum, const std::vector<float>& expected) const {
    std::vector<float> found(expected.size());
    const size_t bytes = expected.size() * sizeof(float);
    const cudaStream_t stream = use_stream(rank);
    CUDA_CHECK(cudaMemcpyAsync(found.data(), sum, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    check(rank);
    if (std::memcmp(found.data(), expected.data(), bytes) == 0) return;
    size_t at = 0;
    while (std::memcmp(&found[at], &expected[at], sizeof(float)) == 0) ++at;
    FAIL(device,
         "[all_reduce] GPU {} adds up wrong: number {} of {} is {}, expected {}; these GPUs cannot run one "
         "model "
         "together",
         devices_[static_cast<size_t>(rank)], at, expected.size(), found[at], expected[at]);
}

/// Of one all_reduce among many that follow each other.
double PeerGroup::microseconds(int64_t count) {
    constexpr int kTimes = 50;
    const Vectors part(devices_, count), sum(devices_, count);
    CUDA_CHECK(cudaSetDevice(devices_[0]));
    cudaEvent_t begin = nullptr, end = nullptr;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 2 * kTimes; ++i)
        for (int r = 0; r < ranks(); ++r) {
            const cudaStream_t stream = use_stream(r);
            if (r == 0 && i == kTimes) CUDA_CHECK(cudaEventRecord(begin, stream));
            all_reduce(r, part.of(r), sum.of(r), count);
        }
    CUDA_CHECK(cudaEventRecord(end, use_stream(0)));
    for (int r = 0; r < ranks(); ++r) {
        CUDA_CHECK(cudaStreamSynchronize(use_stream(r)));
        check(r);
    }
    float milliseconds = 0;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return static_cast<double>(milliseconds) * 1e3 / kTimes;
}

}  // namespace quern::cuda::comm
