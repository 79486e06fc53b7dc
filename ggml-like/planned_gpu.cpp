#include "ggml-like/planned_gpu.h"

#include "ggml-like/check.h"
#include "ggml-like/cuda/pack/packed_layout.h"
#include "ggml-like/one_format.h"

namespace quern {
namespace {

class PlannedGpu final : public Backend {
  public:
    PlannedGpu(std::string description, int64_t total, int64_t free)
        : description_(std::move(description)), memory_{total, free, true} {}

    std::string name() const override { return "CUDA"; }
    std::string description() const override { return description_; }
    int threads() const override { return 1; }
    MemoryInfo memory_info() const override { return memory_; }
    DType activation_dtype() const override { return DType::BF16; }
    int64_t placed_bytes(const Weight& w, RowOrder order) const override {
        if (one_format(w, order)) return cuda::pack::packed_bytes(w, order);
        return cuda::pack::packed_bytes(bf16_form(w), order);
    }
    int64_t placed_bytes(const ExpertWeights& e, RowOrder order) const override {
        if (one_format(e)) return cuda::pack::packed_bytes(e, order);
        return cuda::pack::packed_bytes(bf16_form(e), order);
    }
    bool captures() const override { return true; }

    void* alloc(int64_t, const char*) override { refuse(); }
    void free(void*) override { refuse(); }
    void zero(void*, int64_t) override { refuse(); }
    void upload(void*, const void*, int64_t) override { refuse(); }
    void download(void*, const void*, int64_t) override { refuse(); }
    void copy(void*, const void*, int64_t) override { refuse(); }
    void* alloc_host(int64_t, const char*) override { refuse(); }
    void free_host(void*) override { refuse(); }
    void reserve_weights(int64_t) override { refuse(); }
    void place_weight(Weight&, RowOrder) override { refuse(); }
    void place_experts(ExpertWeights&, RowOrder) override { refuse(); }
    void place_apart(Weight&, RowOrder) override { refuse(); }
    void weights_complete() override { refuse(); }
    void prepare(Plan&) override { refuse(); }
    void run(Plan&) override { refuse(); }
    void synchronize() override { refuse(); }

  private:
    [[noreturn]] void refuse() const { FAIL(device, "{} is only planned for, not there", description_); }

    std::string description_;
    MemoryInfo memory_;
};

}  // namespace

std::unique_ptr<Backend> make_planned_gpu(const std::string& description, int64_t total_bytes,
                                          int64_t free_bytes) {
    return std::make_unique<PlannedGpu>(description, total_bytes, free_bytes);
}

}  // namespace quern
