#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <random>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/communicator.h"
#include "ggml-like/cpu/context.h"

namespace quern {
namespace {

class CpuBackend final : public Backend {
  public:
    CpuBackend(int threads, std::shared_ptr<Communicator> communicator, int rank)
        : communicator_(std::move(communicator)),
          pool_(threads),
          context_{pool_, cpu::dot_kernels(), {}, communicator_.get(), rank} {}

    std::string name() const override { return "CPU"; }
    std::string description() const override {
        return fmt::format("{} thread{}, {}", pool_.size(), pool_.size() == 1 ? "" : "s", context_.dot.name);
    }
    int threads() const override { return pool_.size(); }
    /// Memory that is available without swapping: free memory and the page cache.
    MemoryInfo memory_info() const override {
        MemoryInfo info;
        std::ifstream file("/proc/meminfo");
        std::string key, unit;
        for (int64_t kilobytes = 0; file >> key >> kilobytes; std::getline(file, unit)) {
            if (key == "MemTotal:") info.total_bytes = kilobytes * 1024;
            if (key == "MemAvailable:") info.free_bytes = kilobytes * 1024;
        }
        return info;
    }
    DType activation_dtype() const override { return DType::F32; }

    void* alloc(int64_t bytes, const char* what) override {
        const auto size = static_cast<size_t>((std::max<int64_t>(bytes, 1) + kPlanAlignment - 1) /
                                              kPlanAlignment * kPlanAlignment);
        void* memory = std::aligned_alloc(kPlanAlignment, size);
        if (memory == nullptr) FAIL(memory, "not enough memory: {} bytes for {}", bytes, what);
        return memory;
    }
    void free(void* memory) override { std::free(memory); }
    void zero(void* memory, int64_t bytes) override { std::memset(memory, 0, static_cast<size_t>(bytes)); }
    void upload(void* to, const void* from, int64_t bytes) override { copy(to, from, bytes); }
    void download(void* to, const void* from, int64_t bytes) override { copy(to, from, bytes); }
    void copy(void* to, const void* from, int64_t bytes) override {
        if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    }

    void* alloc_host(int64_t bytes, const char* what) override { return alloc(bytes, what); }
    void free_host(void* memory) override { this->free(memory); }

    /// Mapped files stay where they are; only random weights take memory.
    int64_t placed_bytes(const Weight& weight, RowOrder) const override {
        int64_t bytes = 0;
        for (const WeightSegment& s : weight.segments)
            if (s.data == nullptr) bytes += s.bytes();
        return bytes;
    }
    int64_t placed_bytes(const ExpertWeights& experts, RowOrder order) const override {
        int64_t bytes = 0;
        for (const Weight& w : experts.expert) bytes += placed_bytes(w, order);
        return bytes;
    }
    void reserve_weights(int64_t) override {}
    void place_weight(Weight& weight, RowOrder) override {
        for (WeightSegment& s : weight.segments)
            if (s.data == nullptr) fill_random(s);
    }
    void place_experts(ExpertWeights& experts, RowOrder order) override {
        for (Weight& w : experts.expert) place_weight(w, order);
    }
    void place_apart(Weight& weight, RowOrder order) override { place_weight(weight, order); }
    void weights_complete() override {}
    bool captures() const override { return false; }
    void prepare(Plan&) override {}
    void synchronize() override {}

    void run(Plan& plan) override {
        zero(plan.zeros(), plan.zero_bytes());
        for (const Node& node : plan.graph().nodes()) {
            if (!after_node) {
                node.op->run_cpu(node, context_);
                continue;
            }
            const auto begin = std::chrono::steady_clock::now();
            node.op->run_cpu(node, context_);
            after_node(node, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
                       "");
        }
    }

  private:
    /// Random words; each chunk has its own generator, so the number of threads does not matter.
    void fill_words(std::vector<uint64_t>& words, uint64_t seed, uint64_t keep, uint64_t set) {
        constexpr int64_t kChunk = 1 << 16;
        const auto count = static_cast<int64_t>(words.size());
        pool_.parallel_for((count + kChunk - 1) / kChunk, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t chunk = begin; chunk < end; ++chunk) {
                std::mt19937_64 random(seed + static_cast<uint64_t>(chunk));
                for (int64_t i = chunk * kChunk; i < std::min(count, (chunk + 1) * kChunk); ++i)
                    words[static_cast<size_t>(i)] = (random() & keep) | set;
            }
        });
    }
    void fill_random(WeightSegment& s) {
        const uint64_t seed = std::hash<std::string>{}(s.name);
        const auto words = [&](int64_t bytes) -> std::vector<uint64_t>& {
            return synthetic_.emplace_back(static_cast<size_t>((bytes + 7) / 8));
        };
        // BF16: magnitudes from 2^-9 to 2^-2; E4M3 without NaN; NVFP4: any code, scales around 1
        auto& values = words(dtype_bytes(s.dtype, s.rows * s.cols));
        if (s.dtype == DType::BF16) fill_words(values, seed, 0x83ff83ff83ff83ffu, 0x3c003c003c003c00u);
        if (s.dtype == DType::F8_E4M3) fill_words(values, seed, 0xefefefefefefefefu, 0);
        if (s.dtype == DType::NVFP4) fill_words(values, seed, ~uint64_t{0}, 0);
        s.data = values.data();
        if (s.scale_kind == ScaleKind::nvfp4) {
            auto& scales = words(s.rows * s.cols / 16);
            fill_words(scales, seed + 1, 0x0f0f0f0f0f0f0f0fu, 0x3030303030303030u);
            s.scale = scales.data();
            s.global_scale = 0.4f / std::sqrt(static_cast<float>(s.cols));
        } else if (s.scale_kind == ScaleKind::block128) {
            const int64_t blocks = (s.rows + 127) / 128 * ((s.cols + 127) / 128);
            auto& scales = words(blocks * 4);
            std::fill_n(reinterpret_cast<float*>(scales.data()), blocks,
                        0.01f / std::sqrt(static_cast<float>(s.cols)));
            s.scale = scales.data();
        } else if (s.scale_kind == ScaleKind::per_row) {
            auto& scales = words(s.rows * 4);
            std::fill_n(reinterpret_cast<float*>(scales.data()), s.rows,
                        0.01f / std::sqrt(static_cast<float>(s.cols)));
            s.scale = scales.data();
        }
    }

    std::shared_ptr<Communicator> communicator_;
    cpu::ThreadPool pool_;
    cpu::Context context_;
    std::deque<std::vector<uint64_t>> synthetic_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads, std::shared_ptr<Communicator> communicator, int rank) {
    return std::make_unique<CpuBackend>(threads, std::move(communicator), rank);
}

}  // namespace quern
