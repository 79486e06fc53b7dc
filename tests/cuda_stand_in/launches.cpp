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

std::string fault_of_window(const cudaAccessPolicyWindow& w) {
    if (w.base_ptr == nullptr || w.num_bytes == 0) return "an access policy window of nothing";
    if (static_cast<int64_t>(w.num_bytes) > kMostWindow)
        return fmt::format("an access policy window of {} bytes, where {} are the most", w.num_bytes,
                           kMostWindow);
    if (!(w.hitRatio >= 0 && w.hitRatio <= 1)) return "a hit ratio that is not between 0 and 1";
    if (w.missProp == cudaAccessPropertyPersisting) return "misses that persist";
    return {};
}

/// The attributes of launches that are known here, into `made`. What a GPU would refuse; empty: nothing.
std::string read_attributes(const cudaLaunchConfig_t& config, Launch& made) {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config.attrs[i];
        if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
            if (device().major < 9) return "programmatic launch, which begins with sm_90";
            made.programmatic = attribute.val.programmaticStreamSerializationAllowed != 0;
        } else if (attribute.id == cudaLaunchAttributeAccessPolicyWindow) {
            const cudaAccessPolicyWindow& window = attribute.val.accessPolicyWindow;
            if (std::string fault = fault_of_window(window); !fault.empty()) return fault;
            made.window = static_cast<int64_t>(window.num_bytes);
        } else {
            return "an attribute that the stand-in does not know";
        }
    }
    return {};
}

cudaError_t launch(const KnownKernel* kernel, const cudaLaunchConfig_t& config) {
    if (kernel == nullptr) return fail(cudaErrorInvalidDeviceFunction, "launch of what is no kernel");
    Launch made{kernel, config.gridDim, config.blockDim, static_cast<int64_t>(config.dynamicSmemBytes), false,
                0};
    std::string fault = read_attributes(config, made);
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
           a.shared_bytes == b.shared_bytes && a.programmatic == b.programmatic && a.window == b.window;
}

std::string describe(const Launch& l) {
    return fmt::format("{} grid {} block {} shared {}{}{}", l.kernel->name, text(l.grid), text(l.block),
                       l.shared_bytes, l.programmatic ? " programmatic" : "",
                       l.window > 0 ? fmt::format(" window {}", l.window) : "");
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
