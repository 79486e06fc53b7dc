// The stand-in refuses what a GPU would refuse, and its memory costs nothing until it is touched.
#include <cuda.h>
#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stand_in/kernel_name.h"
#include "cuda_stand_in/kernels.h"

namespace quern::cuda_stand_in {
namespace {

/// A kernel of 1 KB of static shared memory, at most 512 threads and clusters of 4 blocks; device: an H200.
class FakeKernel {
  public:
    FakeKernel() {
        CHECK(cudaSetDevice(kH200) == cudaSuccess);
        add_kernel(this, "fake", {{90, {.static_shared = 1024, .most_threads = 512, .cluster = {4, 1, 1}}}});
    }
    ~FakeKernel() { remove_kernel(this); }
    FakeKernel(const FakeKernel&) = delete;

    /// Why it is refused; empty: it was recorded as it should be.
    std::string launch(dim3 grid, dim3 block, size_t shared = 0) {
        take_record();
        if (cudaLaunchKernel(this, grid, block, nullptr, shared, nullptr) != cudaSuccess)
            return cudaGetErrorString(cudaGetLastError());
        const std::vector<Launch> made = take_record().launches;
        return made.size() == 1 && made[0].kernel == find_kernel(this) && made[0].grid.y == grid.y &&
                       made[0].block.x == block.x && made[0].shared_bytes == static_cast<int64_t>(shared)
                   ? ""
                   : "it was recorded otherwise";
    }
    cudaError_t allow(int shared) {
        return cudaFuncSetAttribute(this, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    }
};

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("stand-in: grids and blocks that no GPU takes are refused") {
    FakeKernel k;
    CHECK(k.launch({8}, {512}) == "");
    CHECK(k.launch({8, 65535}, {32, 16}) == "");
    CHECK(has(k.launch({8}, {513}), "launch bounds"));
    CHECK(has(k.launch({8}, {1025}), "more threads than 1024"));
    CHECK(has(k.launch({8}, {4, 1, 65}), "64 along z"));
    CHECK(has(k.launch({0}, {32}), "no block"));
    CHECK(has(k.launch({8, 1, 0}, {32}), "no block"));
    CHECK(has(k.launch({8}, {32, 0}), "no block"));
    CHECK(has(k.launch({8, 65536}, {32}), "more blocks"));
    CHECK(has(k.launch({8, 1, 65536}, {32}), "more blocks"));
    CHECK(has(k.launch({0x80000000u}, {32}), "more blocks"));
    CHECK(has(k.launch({6}, {32}), "no multiple of the cluster, 4x1x1"));
    CHECK(cudaLaunchKernel("no kernel", {1}, {1}, nullptr, 0, nullptr) == cudaErrorInvalidDeviceFunction);
}

TEST_CASE("stand-in: more shared memory than was allowed, or than there is, is refused") {
    constexpr int kAll = 227 * 1024, kStatic = 1024;
    FakeKernel k;
    CHECK(k.launch({4}, {32}, 47 * 1024) == "");
    CHECK(has(k.launch({4}, {32}, 47 * 1024 + 1), "more shared memory than 48 KB"));
    CHECK(k.allow(100 * 1024) == cudaSuccess);
    CHECK(k.launch({4}, {32}, 100 * 1024) == "");
    CHECK(has(k.launch({4}, {32}, 100 * 1024 + 1), "allowed 102400 bytes"));
    CHECK(k.allow(kAll - kStatic) == cudaSuccess);
    CHECK(k.launch({4}, {32}, kAll - kStatic) == "");
    CHECK(k.allow(kAll - kStatic + 1) == cudaErrorInvalidValue);
    CHECK(has(k.launch({4}, {32}, kAll - kStatic + 1), "1024 static bytes"));
    CHECK(cudaSetDevice(kA100) == cudaSuccess);  // where nothing was allowed yet
    CHECK(has(k.launch({4}, {32}, 50 * 1024), "more shared memory than 48 KB"));
}

TEST_CASE("stand-in: programmatic launch is recorded from sm_90 on, and refused before") {
    FakeKernel k;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = {4}, config.blockDim = {32};
    config.attrs = &attribute, config.numAttrs = 1;
    take_record();
    CHECK(cudaLaunchKernelExC(&config, &k, nullptr) == cudaSuccess);
    CHECK(take_record().launches.at(0).programmatic);
    CHECK(cudaSetDevice(kA100) == cudaSuccess);
    CHECK(cudaLaunchKernelExC(&config, &k, nullptr) != cudaSuccess);
}

TEST_CASE("stand-in: access policy windows are recorded, and refused where they are too large") {
    FakeKernel k;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeAccessPolicyWindow;
    attribute.val.accessPolicyWindow = {&k, kMostWindow, 1.0f, cudaAccessPropertyStreaming,
                                        cudaAccessPropertyStreaming};
    cudaLaunchConfig_t config{};
    config.gridDim = {4}, config.blockDim = {32};
    config.attrs = &attribute, config.numAttrs = 1;
    take_record();
    CHECK(cudaLaunchKernelExC(&config, &k, nullptr) == cudaSuccess);
    CHECK(take_record().launches.at(0).window == kMostWindow);
    attribute.val.accessPolicyWindow.num_bytes += 1;
    CHECK(cudaLaunchKernelExC(&config, &k, nullptr) != cudaSuccess);
    attribute.val.accessPolicyWindow.num_bytes = 0;
    CHECK(cudaLaunchKernelExC(&config, &k, nullptr) != cudaSuccess);
}

TEST_CASE("stand-in: several threads may launch at once, each with its own device, capture and errors") {
    constexpr int kThreads = 4, kLaunches = 2000;
    FakeKernel k;
    take_record();
    // A thread must not throw: no REQUIRE.
    const auto work = [&](int thread) {
        cudaStream_t stream = nullptr;
        int wrong = cudaSetDevice(thread % 2 == 0 ? kH200 : kRtx5090) != cudaSuccess;
        wrong += cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess;
        for (int i = 0; i < kLaunches; ++i) {
            wrong += k.allow(32 * 1024 + thread) != cudaSuccess;
            wrong += cudaLaunchKernel(&k, {4}, {32}, nullptr, 128, stream) != cudaSuccess;
            wrong += cudaLaunchKernel(&k, {4}, {513}, nullptr, 0, stream) == cudaSuccess;
            wrong += !has(cudaGetErrorString(cudaGetLastError()), "launch bounds");
            wrong += cudaStreamSynchronize(stream) != cudaSuccess;  // while others capture
            cudaGraph_t graph = nullptr;
            wrong += cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess;
            wrong += cudaLaunchKernel(&k, {4}, {32}, nullptr, 128, stream) != cudaSuccess;
            wrong += cudaStreamEndCapture(stream, &graph) != cudaSuccess;
            cudaGraphDestroy(graph);
        }
        cudaStreamDestroy(stream);
        CHECK(wrong == 0);
    };
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
    threads.clear();  // waits for all
    CHECK(take_record().launches.size() == size_t{kThreads} * kLaunches);
}

TEST_CASE("stand-in: a stream of another device is refused, and so is memory") {
    CHECK(cudaSetDevice(kRtx5090) == cudaSuccess);
    cudaStream_t stream = nullptr;
    void* memory = nullptr;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaMalloc(&memory, 100) == cudaSuccess);
    FakeKernel k;  // on the H200
    CHECK(cudaLaunchKernel(&k, {4}, {32}, nullptr, 0, stream) == cudaErrorInvalidResourceHandle);
    CHECK(cudaMemset(memory, 0, 100) == cudaErrorInvalidValue);
    CHECK(cudaSetDevice(kRtx5090) == cudaSuccess);
    CHECK(cudaMemset(memory, 0, 101) == cudaErrorInvalidValue);
    CHECK(cudaMemset(memory, 0, 100) == cudaSuccess);
    CHECK(cudaFree(memory) == cudaSuccess);
    CHECK(cudaFree(memory) == cudaErrorInvalidValue);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("stand-in: 100 GB of zeros take no memory, and what was written is zero again") {
    constexpr size_t kBytes = 100'000'000'000, kPlace = 77'777'777'777;
    void* memory = nullptr;
    REQUIRE(cudaMalloc(&memory, kBytes) == cudaSuccess);
    auto* bytes = static_cast<uint8_t*>(memory);
    CHECK(bytes[kPlace] == 0);
    CHECK(cudaMemset(bytes + kPlace - 5000, 7, 10000) == cudaSuccess);
    CHECK(bytes[kPlace] == 7);
    CHECK(cudaMemset(bytes + kPlace - 4990, 0, 9980) == cudaSuccess);
    for (const size_t at : {kPlace - 4990, kPlace, kPlace + 4989}) CHECK(bytes[at] == 0);
    for (const size_t at : {kPlace - 4991, kPlace + 4990}) CHECK(bytes[at] == 7);
    CHECK(cudaMemset(memory, 0, kBytes) == cudaSuccess);
    CHECK(bytes[kPlace + 4990] == 0);
    void* more = nullptr;
    CHECK(cudaMalloc(&more, kBytes) == cudaErrorMemoryAllocation);
    CHECK(cudaFree(memory) == cudaSuccess);
    cudaGetLastError();
}

TEST_CASE("stand-in: descriptions of matrices are checked as the driver checks them") {
    void* function = nullptr;
    REQUIRE(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, 0, nullptr) ==
            cudaSuccess);
    const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    const auto made = [&](uintptr_t data, cuuint64_t stride, cuuint32_t width, cuuint32_t height) {
        CUtensorMap map;
        const cuuint64_t sizes[2] = {640, 100}, strides[1] = {stride};
        const cuuint32_t box[2] = {width, height}, steps[2] = {1, 1};
        return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, reinterpret_cast<void*>(data), sizes,
                      strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    };
    CHECK(made(4096, 1280, 64, 256));
    CHECK_FALSE(made(4104, 1280, 64, 256));
    CHECK_FALSE(made(4096, 1288, 64, 256));
    CHECK_FALSE(made(4096, 1264, 64, 256));
    CHECK_FALSE(made(4096, 1280, 64, 257));
    CHECK_FALSE(made(4096, 1280, 64, 0));
    CHECK_FALSE(made(4096, 1280, 128, 256));
    cudaGetLastError();
}

TEST_CASE("stand-in: names of kernels say nothing of where they stand") {
    CHECK(kernel_name("_ZN5quern4cuda36_GLOBAL__N__fec673c2_4_a_cu_5d3912886kernelILNS0_4KindE2EEEvPi") ==
          "kernel<(Kind)2>");
    for (const Kernel* kernel : kernels()) {
        CAPTURE(kernel->symbol);
        for (const char* part : {"quern", "GLOBAL", "anonymous", ".cu", "_cu_"})
            CHECK_FALSE(has(kernel->name, part));
    }
}

TEST_CASE("stand-in: the compiler's notes on each kernel are found") {
    size_t with_threads = 0;
    for (const Kernel* kernel : kernels()) {
        CAPTURE(kernel->name);
        const auto& compiled = static_cast<const KnownKernel*>(kernel)->compiled;
        CHECK_FALSE(compiled.empty());
        for (const auto& [capability, code] : compiled) with_threads += code.most_threads < 1024;
    }
    CHECK(with_threads > kernels().size() / 2);
}

TEST_CASE("stand-in: graphs take the time that was set, and the time between them is counted") {
    using Clock = std::chrono::steady_clock;
    const auto pause = std::chrono::milliseconds(50);
    CHECK(cudaSetDevice(kH200) == cudaSuccess);
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);

    set_pace({.graph_seconds = 0.05});
    const auto begun = Clock::now();
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);  // follows at once
    CHECK(Clock::now() - begun < pause);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(Clock::now() - begun >= 2 * pause);
    std::this_thread::sleep_for(pause);
    CHECK(cudaGraphLaunch(exec, stream) == cudaSuccess);
    const DeviceTime time = take_device_time();
    CHECK(time.graphs == 3);
    REQUIRE(time.idle_seconds.size() == 2);
    CHECK(time.idle_seconds[0] == 0);
    CHECK(time.idle_seconds[1] >= 0.05);
    CHECK(take_device_time().graphs == 0);

    set_pace({});
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}

}  // namespace
}  // namespace quern::cuda_stand_in
