// Kernels' launches: checked as a GPU would, then recorded.
#include <fmt/format.h>

#include <mutex>
#include <tuple>
#include <utility>

#include "cuda_stand_in/device.h"
#include "cuda_stand_in/errors.h"
#include "cuda_stand_in/kernels.h"
#include "cuda_stand_in/streams.h"

namespace quern::cuda_stand_in {
namespace {

std::mutex record_mutex;

/// Only with the mutex.
Record& record() {
    static Record all;
    return all;
}

auto tie(const uint3& v) { return std::tie(v.x, v.y, v.z); }

std::string text(const uint3& v) {
    if (v.z > 1) return fmt::format("{}x{}x{}", v.x, v.y, v.z);
    return v.y > 1 ? fmt::format("{}x{}", v.x, v.y) : fmt::format("{}", v.x);
}

/// What a GPU would refuse; empty: nothing.
std::string fault_of_grid(const uint3& grid, const uint3& block, const CompiledKernel& code) {
    const int64_t threads = int64_t{block.x} * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) return "no block, or no thread";
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        return "more blocks than 2147483647, 65535 and 65535";
    if (threads > 1024 || block.z > 64) return "more threads than 1024, or than 64 along z";
    if (threads > code.most_threads)
        return fmt::format("more threads than the {} of its launch bounds", code.most_threads);
    const unsigned blocks[] = {grid.x, grid.y, grid.z};
    for (int i = 0; i < 3; ++i)
        if (blocks[i] % static_cast<unsigned>(code.cluster[i]) != 0)
            return fmt::format("a grid that is no multiple of the cluster, {}x{}x{}", code.cluster[0],
                               code.cluster[1], code.cluster[2]);
    return {};
}

std::string fault_of_shared(const KnownKernel& kernel, int64_t dynamic, const CompiledKernel& code) {
    if (dynamic + code.static_shared > device().shared_bytes)
        return fmt::format("{} static bytes of shared memory beside these, where a block has {}",
                           code.static_shared, device().shared_bytes);
    const int64_t most = allowed_shared(kernel);
    if (dynamic > most && dynamic + code.static_shared > kPlainShared)
        return fmt::format("more shared memory than 48 KB, where cudaFuncSetAttribute allowed {} bytes",
                           most);
    return {};
}

/// The only attribute of launches that is known here.
bool is_programmatic(const cudaLaunchConfig_t& config, std::string& fault) {
    bool programmatic = false;
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        if (config.attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization)
            fault = "an attribute that the stand-in does not know";
        else if (device().major < 9)
            fault = "programmatic launch, which begins with sm_90";
        else
            programmatic = config.attrs[i].val.programmaticStreamSerializationAllowed != 0;
    }
    return programmatic;
}

cudaError_t launch(const KnownKernel* kernel, const cudaLaunchConfig_t& config) {
    if (kernel == nullptr) return fail(cudaErrorInvalidDeviceFunction, "launch of what is no kernel");
    std::string fault;
    const bool programmatic = is_programmatic(config, fault);
    const Launch made{kernel, config.gridDim, config.blockDim, static_cast<int64_t>(config.dynamicSmemBytes),
                      programmatic};
    const CompiledKernel code = kernel->code();
    if (fault.empty()) fault = fault_of_grid(made.grid, made.block, code);
    if (fault.empty()) fault = fault_of_shared(*kernel, made.shared_bytes, code);
    if (!fault.empty())
        return fail(cudaErrorInvalidValue, fmt::format("{}: {}: {}", device().name, describe(made), fault));
    return in_order(config.stream, cudaGraphNodeTypeKernel, [made] {
        const std::lock_guard lock(record_mutex);
        record().launches.push_back(made);
        return cudaSuccess;
    });
}

cudaLaunchConfig_t plain_config(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = block;
    config.dynamicSmemBytes = shared, config.stream = stream;
    return config;
}

/// Of the launch that is written with <<< >>>.
cudaLaunchConfig_t& pushed() {
    thread_local cudaLaunchConfig_t config{};
    return config;
}

}  // namespace

bool operator==(const Launch& a, const Launch& b) {
    return a.kernel == b.kernel && tie(a.grid) == tie(b.grid) && tie(a.block) == tie(b.block) &&
           a.shared_bytes == b.shared_bytes && a.programmatic == b.programmatic;
}

std::string describe(const Launch& l) {
    return fmt::format("{} grid {} block {} shared {}{}", l.kernel->name, text(l.grid), text(l.block),
                       l.shared_bytes, l.programmatic ? " programmatic" : "");
}

Record take_record() {
    const std::lock_guard lock(record_mutex);
    return std::exchange(record(), {});
}

void record_mark() {
    const std::lock_guard lock(record_mutex);
    record().marks.push_back(record().launches.size());
}

}  // namespace quern::cuda_stand_in

using namespace quern::cuda_stand_in;

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void**) {
    return launch(find_kernel(host), *config);
}

cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void**, size_t shared,
                             cudaStream_t stream) {
    return launch(find_kernel(host), plain_config(grid, block, shared, stream));
}

// What the compiler makes of <<< >>>.
extern "C" {

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
    pushed() = plain_config(grid, block, shared, stream);
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed().gridDim, *block = pushed().blockDim;
    *shared = pushed().dynamicSmemBytes, *static_cast<cudaStream_t*>(stream) = pushed().stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* host) {
    *handle = reinterpret_cast<cudaKernel_t>(find_kernel(host));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void**, size_t shared,
                               cudaStream_t stream) {
    return launch(reinterpret_cast<const KnownKernel*>(handle), plain_config(grid, block, shared, stream));
}

}  // extern "C"
