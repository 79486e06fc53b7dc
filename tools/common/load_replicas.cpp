#include "tools/common/load_replicas.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"
#include "tools/common/split_flags.h"

namespace quern {
namespace {

using Backends = std::vector<std::unique_ptr<Backend>>;

/// The replicas share the threads, which a single one would have.
Backends on_cpu(int threads, int count) {
    const int all = make_cpu_backend(threads)->threads();
    Backends list;
    for (int r = 0; r < count; ++r) list.push_back(make_cpu_backend(std::max(1, all / count)));
    return list;
}

std::vector<int> gpus_of(const DeviceChoice& choice, int count) {
    std::vector<int> list = choice.devices;
    if (list.empty()) {
        list.resize(static_cast<size_t>(count));
        std::iota(list.begin(), list.end(), 0);
    }
    if (list.size() != static_cast<size_t>(count))
        FAIL(usage, "--device names {} GPU{}, and --data-parallel asks for {}; name one for each replica",
             list.size(), list.size() == 1 ? "" : "s", count);
    return list;
}

/// Answers should not depend on the replica that computes them.
void require_one_kind(const Backends& list, const std::vector<int>& gpus) {
    for (size_t r = 1; r < list.size(); ++r)
        if (list[r]->description() != list[0]->description())
            FAIL(device,
                 "--data-parallel needs GPUs of one kind: GPU {} is {}, GPU {} is {}; name equal ones with "
                 "--device",
                 gpus[0], list[0]->description(), gpus[r], list[r]->description());
}

Backends on_gpus(const std::vector<int>& gpus) {
    for (const int gpu : gpus)
        if (const std::string reason = cuda_unavailable(gpu); !reason.empty())
            FAIL(device, "--data-parallel {} needs {} GPUs, but {}", gpus.size(), gpus.size(), reason);
    Backends list;
    for (const int gpu : gpus) list.push_back(make_cuda_backend(gpu));
    require_one_kind(list, gpus);
    return list;
}

/// As make_backend decides.
bool uses_gpu(const GpuOptions& gpu, int first) {
    if (gpu.kind == GpuOptions::Kind::none) return false;
    const std::string reason = cuda_unavailable(first);
    if (reason.empty()) return true;
    if (gpu.kind == GpuOptions::Kind::all)
        FAIL(device,
             "GPUs were asked for (-ngl, --device), but {}; use -ngl 0 or -ngl auto to run on the CPU",
             reason);
    if (cuda_built()) std::fprintf(stderr, "quern: running on the CPU: %s\n", reason.c_str());
    return false;
}

/// One replica is loaded after the other.
OnProgress part_of(const OnProgress& all, int replica, int count) {
    if (!all) return {};
    return [all, replica, count](const LoadProgress& p) {
        LoadProgress sum = p;
        sum.bytes_done += replica * p.bytes_total;
        sum.bytes_total *= count;
        all(sum);
    };
}

}  // namespace

void require_whole_replicas(const DeviceChoice& choice) {
    if (choice.ranks > 1)
        FAIL(usage, "--data-parallel and -tp {}: a replica has one GPU; leave one of them out", choice.ranks);
    require_no_split(choice, "--data-parallel");
}

LoadedReplicas::~LoadedReplicas() {
    for (LoadedModel& loaded : list) loaded.engine.reset();
}

LoadedReplicas load_replicas(const LoadOptions& options, int count) {
    LoadedReplicas loaded;
    if (count == 1) {
        loaded.list.push_back(load_and_start(options));
        loaded.devices.push_back(loaded.list[0].backend->name());
        return loaded;
    }
    require_whole_replicas(options.devices);
    const std::vector<int> gpus = gpus_of(options.devices, count);
    const bool on_gpu = uses_gpu(options.gpu, gpus.front());
    Backends backends = on_gpu ? on_gpus(gpus) : on_cpu(options.threads, count);
    LoadOptions o = options;
    o.engine.sharing = count;
    for (int r = 0; r < count; ++r) {
        std::unique_ptr<Backend>& backend = backends[static_cast<size_t>(r)];
        loaded.devices.push_back(on_gpu ? fmt::format("GPU {}", gpus[static_cast<size_t>(r)])
                                        : fmt::format("replica {}", r));
        o.progress = part_of(options.progress, r, count);
        backend->use_on_this_thread();
        try {
            loaded.list.push_back(load_and_start(o, std::move(backend)));
        } catch (const Error& error) {
            throw Error(error.kind(), fmt::format("{}: {}", loaded.devices.back(), error.what()));
        }
        const LoadedModel& first = loaded.list.front();
        o.engine.context = first.engine->context();
        o.engine.kept = first.engine->kept_states();
        o.shared_tokenizer = first.model->tokenizer();
        o.measured = true;
    }
    loaded.list[0].backend->use_on_this_thread();
    return loaded;
}

}  // namespace quern
