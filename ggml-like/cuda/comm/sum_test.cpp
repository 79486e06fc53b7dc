#include "ggml-like/cuda/comm/sum_test.h"

#include <cstring>
#include <random>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"

namespace quern::cuda::comm {
namespace {

constexpr uint64_t kTestPatience = 2'000'000'000;

/// A vector on each rank's device.
class Vectors {
  public:
    Vectors(const std::vector<int>& devices, int64_t count) {
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
    std::vector<void*> memory_;
};

std::vector<std::vector<float>> random_parts(int ranks, int64_t count) {
    std::minstd_rand random(static_cast<unsigned>(count));
    std::vector<std::vector<float>> parts(static_cast<size_t>(ranks));
    for (auto& part : parts) {
        part.resize(static_cast<size_t>(count));
        for (float& x : part) x = static_cast<float>(random()) * 0x1p-30f - 1;
    }
    return parts;
}

std::vector<float> sum_of(const std::vector<std::vector<float>>& parts) {
    std::vector<float> sum = parts[0];
    for (size_t r = 1; r < parts.size(); ++r)
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += parts[r][i];
    return sum;
}

/// Waits for the rank's work. Whether all messages came; throws Error(device) if its sum is not the expected one.
bool compare(const PeerGroup& group, int rank, const float* sum, const std::vector<float>& expected) {
    std::vector<float> found(expected.size());
    const size_t bytes = expected.size() * sizeof(float);
    const cudaStream_t stream = group.use_stream(rank);
    CUDA_CHECK(cudaMemcpyAsync(found.data(), sum, bytes, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    if (group.lost(rank)) return false;
    if (std::memcmp(found.data(), expected.data(), bytes) == 0) return true;
    size_t at = 0;
    while (std::memcmp(&found[at], &expected[at], sizeof(float)) == 0) ++at;
    const bool direct = group.link() == Link::peer_access;
    FAIL(device, "[all_reduce] GPU {} adds up wrong: number {} of {} is {}, expected {}; {}",
         group.devices()[static_cast<size_t>(rank)], at, expected.size(), found[at], expected[at],
         direct ? "try --no-peer-access, which adds up through host memory"
                : "these GPUs cannot run one model together");
}

bool test_size(PeerGroup& group, int64_t count) {
    constexpr int kTurns = 3;  // both places of a mailbox, one of them again
    const auto parts = random_parts(group.ranks(), count);
    const std::vector<float> expected = sum_of(parts);
    const Vectors part(group.devices(), count), sum(group.devices(), count);
    const size_t bytes = expected.size() * sizeof(float);
    for (int r = 0; r < group.ranks(); ++r) {
        const cudaStream_t stream = group.use_stream(r);
        CUDA_CHECK(cudaMemcpyAsync(part.of(r), parts[static_cast<size_t>(r)].data(), bytes,
                                   cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
    }
    bool complete = true;
    for (int turn = 0; turn < kTurns && complete; ++turn) {
        for (int r = 0; r < group.ranks(); ++r) {
            CUDA_CHECK(cudaMemsetAsync(sum.of(r), 0xff, bytes, group.use_stream(r)));
            group.all_reduce(r, part.of(r), sum.of(r), count);
        }
        for (int r = 0; r < group.ranks(); ++r) complete = compare(group, r, sum.of(r), expected) && complete;
    }
    return complete;
}

/// Of one all_reduce among many that follow each other.
double microseconds(PeerGroup& group, int64_t count) {
    constexpr int kTimes = 50;
    const Vectors part(group.devices(), count), sum(group.devices(), count);
    group.use_stream(0);
    cudaEvent_t begin = nullptr, end = nullptr;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 2 * kTimes; ++i)
        for (int r = 0; r < group.ranks(); ++r) {
            const cudaStream_t stream = group.use_stream(r);
            if (r == 0 && i == kTimes) CUDA_CHECK(cudaEventRecord(begin, stream));
            group.all_reduce(r, part.of(r), sum.of(r), count);
        }
    CUDA_CHECK(cudaEventRecord(end, group.use_stream(0)));
    for (int r = 0; r < group.ranks(); ++r) {
        CUDA_CHECK(cudaStreamSynchronize(group.use_stream(r)));
        group.check(r);
    }
    float milliseconds = 0;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return static_cast<double>(milliseconds) * 1e3 / kTimes;
}

}  // namespace

std::optional<std::string> test_sums(PeerGroup& group) {
    const uint64_t patience = group.set_patience(kTestPatience);
    // One block and many, in packets and in chunks, and what is no whole chunk.
    for (const int64_t count : {int64_t{16}, int64_t{2048}, int64_t{5120}, int64_t{131072}, 2 * kSmallPairs,
                                2 * kSmallPairs + 4, int64_t{1'500'004}})
        if (!test_size(group, count)) return std::nullopt;
    const double small = microseconds(group, 2048), large = microseconds(group, 2'097'152);
    group.set_patience(patience);
    return fmt::format("8 KB added up in {:.1f} us, 8 MB in {:.0f} us", small, large);
}

}  // namespace quern::cuda::comm
