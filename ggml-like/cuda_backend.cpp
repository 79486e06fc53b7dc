// Host side of the CUDA backend: memory, weights, captured plans. Kernels are in ops/*.cu and cuda/*.cu.
#include "ggml-like/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"
#include "ggml-like/cuda/comm/devices.h"
#include "ggml-like/cuda/comm/handover.h"
#include "ggml-like/cuda/comm/peer_group.h"
#include "ggml-like/cuda/event.h"
#include "ggml-like/cuda/launch_table.h"
#include "ggml-like/cuda/linear/warpgroup_shapes.h"
#include "ggml-like/cuda/pack/copy_inputs.h"
#include "ggml-like/cuda/pack/host_memory.h"
#include "ggml-like/cuda/pack/packed_layout.h"
#include "ggml-like/cuda/pack/place.h"
#include "ggml-like/cuda/pack/state_copies.h"
#include "ggml-like/one_format.h"

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

constexpr int kOldest = 80;                  // compute capability
constexpr int64_t kSpareBlock = 32ll << 20;  // for weights that nobody reserved memory for

/// Makes the device this thread's for all that is made after it.
class Chosen {
  public:
    explicit Chosen(int device) : device_(device) { CUDA_CHECK(cudaSetDevice(device)); }
    operator int() const { return device_; }

  private:
    int device_;
};

/// Makes the device's context, which fails on devices in exclusive use.
cudaError_t open_device(int device) {
    cudaError_t code = cudaSetDevice(device);
    if (code == cudaSuccess) code = cudaFree(nullptr);
    cudaGetLastError();
    return code;
}

/// A piece of device memory that weights are taken from, from front to back.
struct Block {
    std::byte* memory;
    int64_t bytes, used = 0;
};

/// A weight in memory of its own.
struct Apart {
    cuda::pack::Packed packed;
    std::vector<std::shared_ptr<void>> memory;
};

class CudaBackend final : public Backend {
  public:
    /// `peers`: of the ranks that this backend belongs to, if it belongs to several.
    CudaBackend(int device, int max_shared, std::shared_ptr<cuda::comm::PeerGroup> peers = nullptr,
                int rank = 0)
        : device_(device), peers_(std::move(peers)), rank_(rank), handover_(device) {
        CUDA_CHECK(cudaGetDeviceProperties(&properties_, device));
        CUDA_CHECK(cudaStreamCreateWithFlags(&context_.stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaStreamCreateWithFlags(&sending_, cudaStreamNonBlocking));
        states_ = std::make_unique<cuda::pack::StateCopies>(
            context_.stream, properties_.canUseHostPointerForRegisteredMem != 0);
        context_.sms = properties_.multiProcessorCount;
        context_.capability = properties_.major * 10 + properties_.minor;
        context_.window_bytes = properties_.accessPolicyMaxWindowSize;
        context_.shared_bytes = static_cast<int>(properties_.sharedMemPerBlockOptin);
        if (max_shared > 0) context_.shared_bytes = std::min(context_.shared_bytes, max_shared);
        context_.warpgroups = max_shared == 0 && context_.capability == 90 && cuda::linear::has_warpgroups();
        constexpr size_t kCounterBytes = (cuda::kCounters + cuda::kTourCounters) * sizeof(unsigned);
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&context_.counters), kCounterBytes));
        CUDA_CHECK(cudaMemset(context_.counters, 0, kCounterBytes));
        uploader_ = std::make_unique<cuda::pack::Uploader>(context_.stream, threads());
        if (peers_ == nullptr) return;
        context_.peers = &peers_->peers(rank_);
        peers_->attach(rank_, context_);
    }
    ~CudaBackend() override {
        cudaStreamSynchronize(context_.stream);
        states_.reset();
        uploader_.reset();
        apart_.clear();
        for (const Block& block : weights_) cudaFree(block.memory);
        cudaFree(context_.counters);
        cudaStreamSynchronize(sending_);
        cudaStreamDestroy(sending_);
        cudaStreamDestroy(context_.stream);
    }

    std::string name() const override { return "CUDA"; }
    std::string description() const override {
        return fmt::format("{}, {:.0f} GB, sm_{}", properties_.name,
                           static_cast<double>(properties_.totalGlobalMem) / 1e9, context_.capability);
    }
    std::string bus_id() const override {
        return fmt::format("{:08X}:{:02X}:{:02X}.0", properties_.pciDomainID, properties_.pciBusID,
                           properties_.pciDeviceID);
    }
    int threads() const override {
        return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
    }
    MemoryInfo memory_info() const override {
        size_t available = 0, total = 0;
        CUDA_CHECK(cudaMemGetInfo(&available, &total));
        return {static_cast<int64_t>(total), static_cast<int64_t>(available), true};
    }
    void use_on_this_thread() const override { CUDA_CHECK(cudaSetDevice(device_)); }
    DType activation_dtype() const override { return DType::BF16; }

    void* alloc(int64_t bytes, const char* what) override {
        void* memory = nullptr;
        const cudaError_t code = cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
        if (code == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            FAIL(memory, "not enough GPU memory: {:.2f} GB for {}, {:.2f} GB are free",
                 static_cast<double>(bytes) / 1e9, what, static_cast<double>(memory_info().free_bytes) / 1e9);
        }
        CUDA_CHECK(code);
        return memory;
    }
    void free(void* memory) override { cudaFree(memory); }
    void zero(void* memory, int64_t bytes) override {
        if (bytes == 0) return;
        CUDA_CHECK(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), context_.stream));
    }
    void upload(void* to, const void* from, int64_t bytes) override {
        CUDA_CHECK(
            cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, context_.stream));
    }
    void download(void* to, const void* from, int64_t bytes) override {
        CUDA_CHECK(
            cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, context_.stream));
        synchronize();
    }
    void copy(void* to, const void* from, int64_t bytes) override {
        CUDA_CHECK(
            cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, context_.stream));
    }

    void upload_between(const InputCopy& first, const InputCopy& second) override {
        if (!states_->reaches_host() || after_node) return Backend::upload_between(first, second);
        cuda::pack::copy_inputs(context_.stream, {first.to, first.from_host, first.bytes},
                                {second.to, second.from_host, second.bytes});
    }
    void send(void* to, const void* from, int64_t bytes) override {
        CUDA_CHECK(
            cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, context_.stream));
    }
    void send_beside(void* to, const void* from, int64_t bytes, int mark) override {
        CUDA_CHECK(cudaEventRecord(before_sending_.get(), context_.stream));
        CUDA_CHECK(cudaStreamWaitEvent(sending_, before_sending_.get()));
        CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, sending_));
        CUDA_CHECK(cudaEventRecord(event_of(mark), sending_));
        sends_ = true;
    }
    void set_mark(int mark) override { CUDA_CHECK(cudaEventRecord(event_of(mark), context_.stream)); }
    void await_mark(int mark) override {
        const auto& event = marks_.at(static_cast<size_t>(mark));
        if (event != nullptr) CUDA_CHECK(cudaEventSynchronize(event->get()));
    }

    void save(std::span<const BlockCopy> list) override { states_->save(list); }
    void order_after_saves() override { states_->order_after_saves(); }
    void finish_saves() override { states_->finish_saves(); }
    bool saves_ended() override { return states_->saves_ended(); }
    void load(std::span<const BlockCopy> list) override { states_->load(list); }

    void receive(Backend& sender, std::span<const BlockCopy> list) override {
        auto& from = dynamic_cast<CudaBackend&>(sender);
        handover_.receive(from.handover_, from.context_.stream, context_.stream, list);
    }
    void read_directly(bool directly) { handover_.read_directly(directly); }

    void* alloc_host(int64_t bytes, const char* what) override {
        CUDA_CHECK(cudaSetDevice(device_));  // of this thread
        return cuda::pack::alloc_host(bytes, what);
    }
    void free_host(void* memory) override { cuda::pack::free_host(memory); }

    int64_t placed_bytes(const Weight& weight, RowOrder order) const override {
        if (one_format(weight, order)) return cuda::pack::packed_bytes(weight, order);
        return cuda::pack::packed_bytes(bf16_form(weight), order);
    }
    int64_t placed_bytes(const ExpertWeights& experts, RowOrder order) const override {
        if (one_format(experts)) return cuda::pack::packed_bytes(experts, order);
        return cuda::pack::packed_bytes(bf16_form(experts), order);
    }
    void reserve_weights(int64_t bytes) override { add_block(bytes, "weights"); }
    void place_weight(Weight& weight, RowOrder order) override {
        const auto place = [&](const Weight& w) {
            weight.placed =
                &packed_.emplace_back(cuda::pack::place_weight(w, order, *uploader_, allocator()));
        };
        if (one_format(weight, order)) return place(weight);
        const InBf16<Weight> same = to_bf16(weight, threads());
        place(same.form);
        uploader_->flush();  // before its memory goes
    }
    void place_experts(ExpertWeights& experts, RowOrder order) override {
        const auto place = [&](const ExpertWeights& e) {
            experts.placed =
                &experts_.emplace_back(cuda::pack::place_experts(e, order, *uploader_, allocator()));
        };
        if (one_format(experts)) return place(experts);
        const InBf16<ExpertWeights> same = to_bf16(experts, threads());
        place(same.form);
        uploader_->flush();
    }
    void share_first_rows(Weight& part, const Weight& of) override {
        const auto& whole = *static_cast<const cuda::pack::Packed*>(of.placed);
        const int rows = static_cast<int>(part.rows);
        part = quern::first_rows(of, rows);
        part.placed = &packed_.emplace_back(cuda::pack::first_rows(whole, rows));
    }
    void place_apart(Weight& weight, RowOrder order) override {
        if (const auto old = apart_.find(weight.placed); old != apart_.end()) {
            synchronize();
            apart_.erase(old);
        }
        auto apart = std::make_unique<Apart>();
        const auto allocate = [&](int64_t bytes, const char* what) {
            void* memory = alloc(bytes, what);
            apart->memory.emplace_back(memory, [](void* m) { cudaFree(m); });
            zero_now(memory, bytes);
            return memory;
        };
        apart->packed = cuda::pack::place_weight(weight, order, *uploader_, allocate);
        uploader_->flush();
        weight.placed = &apart->packed;
        apart_[weight.placed] = std::move(apart);
    }
    void finish_reading() override { uploader_->flush(); }
    void weights_complete() override {
        uploader_->finish();
        CUDA_CHECK(cudaDeviceSynchronize());  // random weights are filled on the default stream
    }

    bool captures() const override { return true; }
    bool asynchronous() const override { return true; }
    void prepare(Plan& plan) override {
        for (const Node& node : plan.graph().nodes()) cuda::launch_of(node.op);
        if (plan.use() == PlanUse::sometimes) return;
        cudaGraph_t graph = nullptr;
        CUDA_CHECK(cudaStreamBeginCapture(context_.stream, cudaStreamCaptureModeThreadLocal));
        try {
            launch_all(plan);
        } catch (...) {
            cudaStreamEndCapture(context_.stream, &graph);
            if (graph != nullptr) cudaGraphDestroy(graph);
            throw;
        }
        CUDA_CHECK(cudaStreamEndCapture(context_.stream, &graph));
        plan.kernels = count_kernels(graph);
        cudaGraphExec_t exec = nullptr;
        const cudaError_t code = cudaGraphInstantiate(&exec, graph, 0);
        cudaGraphDestroy(graph);
        CUDA_CHECK(code);
        plan.captured = std::shared_ptr<void>(
            exec, [](void* e) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e)); });
    }

    void run(Plan& plan) override {
        if (after_node) return run_timed(plan);
        if (plan.captured != nullptr) {
            CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(plan.captured.get()), context_.stream));
            return;
        }
        launch_all(plan);
    }
    void synchronize() override {
        CUDA_CHECK(cudaStreamSynchronize(context_.stream));
        if (std::exchange(sends_, false)) CUDA_CHECK(cudaStreamSynchronize(sending_));
        if (peers_ != nullptr) peers_->check(rank_);
    }

  private:
    cudaEvent_t event_of(int mark) {
        std::unique_ptr<cuda::Event>& event = marks_.at(static_cast<size_t>(mark));
        if (event == nullptr) event = std::make_unique<cuda::Event>();
        return event->get();
    }
    void launch_all(const Plan& plan) {
        zero(plan.zeros(), plan.zero_bytes());
        for (const Node& node : plan.graph().nodes()) cuda::launch_of(node.op)(node, context_);
    }
    static int64_t count_kernels(cudaGraph_t graph) {
        size_t count = 0;
        CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
        std::vector<cudaGraphNode_t> nodes(count);
        CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
        return std::count_if(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
            cudaGraphNodeType type{};
            CUDA_CHECK(cudaGraphNodeGetType(node, &type));
            return type == cudaGraphNodeTypeKernel;
        });
    }
    static std::string names_of(const cuda::Launched& launched) {
        return fmt::format("{}", fmt::join(launched.kernel, launched.kernel + launched.count, ", "));
    }
    /// Node by node between events; times include the launch gaps that a captured plan does not have.
    void run_timed(Plan& plan) {
        const auto& nodes = plan.graph().nodes();
        const std::vector<cuda::TimedEvent> events(nodes.size() + 1);
        zero(plan.zeros(), plan.zero_bytes());
        CUDA_CHECK(cudaEventRecord(events[0].get(), context_.stream));
        std::vector<cuda::Launched> launched(nodes.size());
        for (size_t i = 0; i < nodes.size(); ++i) {
            Context told = context_;
            told.launched = &launched[i];
            cuda::launch_of(nodes[i].op)(nodes[i], told);
            CUDA_CHECK(cudaEventRecord(events[i + 1].get(), context_.stream));
        }
        synchronize();
        for (size_t i = 0; i < nodes.size(); ++i) {
            float milliseconds = 0;
            CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events[i].get(), events[i + 1].get()));
            after_node(nodes[i], static_cast<double>(milliseconds) * 1e-3, names_of(launched[i]));
        }
    }

    Block& add_block(int64_t bytes, const char* what) {
        auto* memory = static_cast<std::byte*>(alloc(bytes, what));
        weights_.push_back({memory, bytes});
        zero_now(memory, bytes);
        return weights_.back();
    }
    /// For the padding of packed weights.
    static void zero_now(void* memory, int64_t bytes) {
        CUDA_CHECK(cudaMemset(memory, 0, static_cast<size_t>(bytes)));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    void* take(int64_t bytes, const char* what) {
        const int64_t size = (bytes + cuda::pack::kWeightAlignment - 1) / cuda::pack::kWeightAlignment *
                             cuda::pack::kWeightAlignment;
        const bool room = !weights_.empty() && weights_.back().used + size <= weights_.back().bytes;
        Block& block = room ? weights_.back() : add_block(std::max(size, kSpareBlock), what);
        void* memory = block.memory + block.used;
        block.used += size;
        return memory;
    }
    cuda::pack::Allocate allocator() {
        return [this](int64_t bytes, const char* what) { return take(bytes, what); };
    }

    const Chosen device_;
    const std::shared_ptr<cuda::comm::PeerGroup> peers_;
    const int rank_;
    cudaDeviceProp properties_{};
    Context context_;
    std::unique_ptr<cuda::pack::StateCopies> states_;
    cuda::comm::Handover handover_;
    std::unique_ptr<cuda::pack::Uploader> uploader_;
    std::deque<cuda::pack::Packed> packed_;
    std::deque<cuda::pack::PackedExperts> experts_;
    std::vector<Block> weights_;
    std::map<const void*, std::unique_ptr<Apart>> apart_;  // by what Weight::placed points to
    std::array<std::unique_ptr<cuda::Event>, kMarks> marks_;
    cudaStream_t sending_ = nullptr;  // of send_beside
    cuda::Event before_sending_;
    bool sends_ = false;  // something is on its way there, perhaps
};

}  // namespace

bool cuda_built() { return true; }

std::string cuda_unavailable(int device) {
    // Kernels are loaded when the device is opened: their memory is taken before anybody counts what is free.
    ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    int driver = 0, count = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no NVIDIA driver is installed";
    const cudaError_t code = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (code == cudaErrorInsufficientDriver)
        return fmt::format(
            "the NVIDIA driver is too old: it supports CUDA {}.{}, and this build needs CUDA {}.{}; update "
            "the driver",
            driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (code != cudaSuccess || count == 0) {
        const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
        return fmt::format("no NVIDIA GPU can be used ({}{})",
                           code == cudaSuccess ? "none found" : cudaGetErrorString(code),
                           visible == nullptr ? "" : fmt::format("; CUDA_VISIBLE_DEVICES is '{}'", visible));
    }
    if (device < 0 || device >= count)
        return fmt::format("there is no GPU {}: this machine has {} (0 to {})", device, count, count - 1);
    cudaDeviceProp properties{};
    if (const cudaError_t failed = cudaGetDeviceProperties(&properties, device); failed != cudaSuccess)
        return fmt::format("GPU {} does not answer: {}", device, cudaGetErrorString(failed));
    if (properties.major * 10 + properties.minor < kOldest)
        return fmt::format("GPU {} is an {} (sm_{}{}), and quern needs sm_80 (Ampere) or newer", device,
                           properties.name, properties.major, properties.minor);
    if (const cudaError_t failed = open_device(device); failed != cudaSuccess)
        return fmt::format(
            "GPU {} ({}) cannot be opened: {}; another process may hold it alone or fill its memory, or "
            "this build has no code for sm_{}{}",
            device, properties.name, cudaGetErrorString(failed), properties.major, properties.minor);
    return {};
}

std::unique_ptr<Backend> make_cuda_backend(int device, int max_shared) {
    if (const std::string reason = cuda_unavailable(device); !reason.empty()) FAIL(device, "{}", reason);
    return std::make_unique<CudaBackend>(device, max_shared);
}

int cuda_devices() {
    int count = 0;
    const bool known = cudaGetDeviceCount(&count) == cudaSuccess;
    cudaGetLastError();
    return known ? count : 0;
}

namespace cuda::comm {

std::unique_ptr<Backend> make_rank(int device, std::shared_ptr<PeerGroup> peers, int rank) {
    return std::make_unique<CudaBackend>(device, 0, std::move(peers), rank);
}

std::unique_ptr<Backend> make_stage(int device, bool reads_sender) {
    auto stage = std::make_unique<CudaBackend>(device, 0);
    stage->read_directly(reads_sender);
    return stage;
}

}  // namespace cuda::comm

}  // namespace quern
