#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"

namespace quern {
namespace {

class CpuBackend final : public Backend {
  public:
    explicit CpuBackend(int threads) : pool_(threads), context_{pool_, cpu::dot_kernels(), {}} {}

    std::string name() const override { return "CPU"; }
    std::string description() const override {
        return fmt::format("{} thread{}, {}", pool_.size(), pool_.size() == 1 ? "" : "s", context_.dot.name);
    }
    int threads() const override { return pool_.size(); }
    /// What could be had without swapping: free memory and the page cache that can be dropped.
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

    void place_weight(Weight&, RowOrder) override {}
    void place_experts(ExpertWeights&, RowOrder) override {}
    void weights_complete() override {}
    void prepare(Plan&) override {}
    void synchronize() override {}

    void run(Plan& plan) override {
        for (const Node& node : plan.graph().nodes()) {
            if (!after_node) {
                node.op->run_cpu(node, context_);
                continue;
            }
            const auto begin = std::chrono::steady_clock::now();
            node.op->run_cpu(node, context_);
            after_node(node, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        }
    }

  private:
    cpu::ThreadPool pool_;
    cpu::Context context_;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads) { return std::make_unique<CpuBackend>(threads); }

}  // namespace quern
