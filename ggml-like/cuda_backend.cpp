// Host side of the CUDA backend: memory, weights, captured plans. Kernels are in ops/*.cu and cuda/*.cu.
#include "ggml-like/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>
#include <map>
#include <thread>
#include <vector>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/place.h"
#include "ggml-like/ops/conv_gated_delta_net.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/gated_attention.h"
#include "ggml-like/ops/gated_norm_linear_add.h"
#include "ggml-like/ops/gather_rows.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/logits_top.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"
#include "ggml-like/ops/moe_route.h"
#include "ggml-like/ops/norm_linear.h"

namespace quern {
namespace cuda {

void check_launch(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    const char* text = cudaGetErrorString(code);
    if (code == cudaErrorMemoryAllocation) FAIL(memory, "the GPU is out of memory: {} ({})", what, text);
    FAIL(device, "the GPU reported an error in {}: {} ({})", what, text, cudaGetErrorName(code));
}

[[noreturn]] void unsupported(const char* op, const char* what) {
    FAIL(device, "[{}] the GPU kernels do not support {}; use -ngl 0", op, what);
}

}  // namespace cuda

namespace {

using cuda::Context;

constexpr int kOldest = 80;          // compute capability
constexpr int64_t kCaptureTokens = 64;  // plans of up to so many rows are captured

using Launch = void (*)(const Node&, Context&);

Launch launch_of(const Op* op) {
    static const std::map<const Op*, Launch> kTable{
        {&kEmbed, cuda::embed},
        {&kNormLinear, cuda::norm_linear},
        {&kLinearAdd, cuda::linear_add},
        {&kGatedNormLinearAdd, cuda::gated_norm_linear_add},
        {&kConvGatedDeltaNet, cuda::conv_gated_delta_net},
        {&kGatedAttention, cuda::gated_attention},
        {&kMoeRoute, cuda::moe_route},
        {&kMoeGateUp, cuda::moe_gate_up},
        {&kMoeDown, cuda::moe_down},
        {&kGatherRows, cuda::gather_rows},
        {&kLogitsTop, cuda::logits_top},
    };
    const auto it = kTable.find(op);
    if (it == kTable.end()) FAIL(device, "[{}] has no GPU kernel", op->name);
    return it->second;
}

int64_t rows_of(const Plan& plan) {
    int64_t rows = 0;
    for (const Tensor* t : plan.graph().inputs()) rows = std::max(rows, t->rank == 1 ? t->shape[0] : 0);
    return rows;
}

class CudaBackend final : public Backend {
  public:
    explicit CudaBackend(int device) {
        CUDA_CHECK(cudaSetDevice(device));
        CUDA_CHECK(cudaGetDeviceProperties(&properties_, device));
        CUDA_CHECK(cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking));
        context_.sms = properties_.multiProcessorCount;
        context_.capability = properties_.major * 10 + properties_.minor;
        context_.shared_bytes = static_cast<int>(properties_.sharedMemPerBlockOptin);
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&context_.counters), cuda::kCounters * sizeof(unsigned)));
        CUDA_CHECK(cudaMemset(context_.counters, 0, cuda::kCounters * sizeof(unsigned)));
        uploader_ = std::make_unique<cuda::Uploader>(context_.stream, threads());
    }
    ~CudaBackend() override {
        cudaStreamSynchronize(context_.stream);
        uploader_.reset();
        for (void* memory : weights_) cudaFree(memory);
        cudaFree(context_.counters);
        cudaStreamDestroy(context_.stream);
    }

    std::string name() const override { return "CUDA"; }
    std::string description() const override {
        return fmt::format("{}, {:.0f} GB, sm_{}", properties_.name, static_cast<double>(properties_.totalGlobalMem) / 1e9,
                           context_.capability);
    }
    int threads() const override { return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u)); }
    MemoryInfo memory_info() const override {
        size_t available = 0, total = 0;
        CUDA_CHECK(cudaMemGetInfo(&available, &total));
        return {static_cast<int64_t>(total), static_cast<int64_t>(available)};
    }
    DType activation_dtype() const override { return DType::BF16; }

    void* alloc(int64_t bytes, const char* what) override {
        void* memory = nullptr;
        const cudaError_t code = cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
        if (code == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            FAIL(memory, "not enough GPU memory: {:.2f} GB for {}, {:.2f} GB are free", static_cast<double>(bytes) / 1e9,
                 what, static_cast<double>(memory_info().free_bytes) / 1e9);
        }
        CUDA_CHECK(code);
        return memory;
    }
    void free(void* memory) override { cudaFree(memory); }
    void zero(void* memory, int64_t bytes) override {
        CUDA_CHECK(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), context_.stream));
    }
    void upload(void* to, const void* from, int64_t bytes) override {
        CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, context_.stream));
    }
    void download(void* to, const void* from, int64_t bytes) override {
        CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, context_.stream));
        synchronize();
    }
    void copy(void* to, const void* from, int64_t bytes) override {
        CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, context_.stream));
    }

    void place_weight(Weight& weight, RowOrder order) override {
        weight.placed = &packed_.emplace_back(cuda::place_weight(weight, order, *uploader_, allocator()));
    }
    void place_experts(ExpertWeights& experts, RowOrder order) override {
        experts.placed = &experts_.emplace_back(cuda::place_experts(experts, order, *uploader_, allocator()));
    }
    void weights_complete() override { uploader_->finish(); }

    /// Captures plans of few rows; the first run of a kernel loads it, so that happens here as well.
    void prepare(Plan& plan) override {
        for (const Node& node : plan.graph().nodes()) launch_of(node.op);
        if (rows_of(plan) > kCaptureTokens) return;
        cudaGraph_t graph = nullptr;
        CUDA_CHECK(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeThreadLocal));
        try {
            for (const Node& node : plan.graph().nodes()) launch_of(node.op)(node, context_);
        } catch (...) {
            cudaStreamEndCapture(context_.stream, &graph);
            if (graph != nullptr) cudaGraphDestroy(graph);
            throw;
        }
        CUDA_CHECK(cudaStreamEndCapture(context_.stream, &graph));
        cudaGraphExec_t exec = nullptr;
        const cudaError_t code = cudaGraphInstantiate(&exec, graph, 0);
        cudaGraphDestroy(graph);
        CUDA_CHECK(code);
        plan.captured = std::shared_ptr<void>(exec, [](void* e) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e)); });
    }

    void run(Plan& plan) override {
        if (after_node) return run_timed(plan);
        if (plan.captured != nullptr) {
            CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(plan.captured.get()), context_.stream));
            return;
        }
        for (const Node& node : plan.graph().nodes()) launch_of(node.op)(node, context_);
    }
    void synchronize() override { CUDA_CHECK(cudaStreamSynchronize(context_.stream)); }

  private:
    /// Node by node between events; times include the launch gaps that a captured plan does not have.
    void run_timed(Plan& plan) {
        const auto& nodes = plan.graph().nodes();
        std::vector<cudaEvent_t> events(nodes.size() + 1);
        for (cudaEvent_t& e : events) CUDA_CHECK(cudaEventCreate(&e));
        CUDA_CHECK(cudaEventRecord(events[0], context_.stream));
        for (size_t i = 0; i < nodes.size(); ++i) {
            launch_of(nodes[i].op)(nodes[i], context_);
            CUDA_CHECK(cudaEventRecord(events[i + 1], context_.stream));
        }
        synchronize();
        for (size_t i = 0; i < nodes.size(); ++i) {
            float milliseconds = 0;
            CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]));
            after_node(nodes[i], static_cast<double>(milliseconds) * 1e-3);
        }
        for (cudaEvent_t e : events) cudaEventDestroy(e);
    }

    cuda::Allocate allocator() {
        return [this](int64_t bytes, const char* what) { return weights_.emplace_back(alloc(bytes, what)); };
    }

    cudaDeviceProp properties_{};
    Context context_;
    std::unique_ptr<cuda::Uploader> uploader_;
    std::deque<cuda::Packed> packed_;
    std::deque<cuda::PackedExperts> experts_;
    std::vector<void*> weights_;
};

}  // namespace

std::string cuda_unavailable() {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaErrorInsufficientDriver) return "the NVIDIA driver is too old for CUDA 13; update it to 580 or newer";
    if (code != cudaSuccess || count == 0) {
        cudaGetLastError();
        return fmt::format("no NVIDIA GPU can be used ({})", code == cudaSuccess ? "none found" : cudaGetErrorString(code));
    }
    return {};
}

std::unique_ptr<Backend> make_cuda_backend(int device) {
    if (const std::string reason = cuda_unavailable(); !reason.empty()) FAIL(device, "{}", reason);
    int count = 0;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    if (device < 0 || device >= count)
        FAIL(device, "GPU {} was asked for, but this machine has {} (0 to {})", device, count, count - 1);
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    if (properties.major * 10 + properties.minor < kOldest)
        FAIL(device, "GPU {} is an {} (sm_{}{}); quern needs sm_80 (Ampere) or newer", device, properties.name,
             properties.major, properties.minor);
    return std::make_unique<CudaBackend>(device);
}

}  // namespace quern
