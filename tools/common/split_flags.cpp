#include "tools/common/split_flags.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <numeric>
#include <string>

#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/stage_group.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/common/loading.h"

namespace quern {
namespace {

constexpr size_t kMaxStages = 16;

void set_mode(DeviceChoice& choice, const std::string& mode) {
    if (mode == "row" || mode == "tensor")
        FAIL(usage, "-sm {}: say -tp N instead, for the number of GPUs that share every layer", mode);
    if (mode != "layer" && mode != "none")
        FAIL(usage, "-sm: expected none or layer, found '{}'", printable(mode));
    choice.by_layers = mode == "layer";
}

/// All GPUs that can be used; those that cannot are named on stderr.
std::vector<int> usable_gpus() {
    std::vector<int> list;
    for (int device = 0; device < cuda_devices(); ++device) {
        const std::string reason = cuda_unavailable(device);
        if (reason.empty())
            list.push_back(device);
        else
            std::fprintf(stderr, "quern: left out: %s\n", reason.c_str());
    }
    return list;
}

std::vector<int> gpus_of(const DeviceChoice& choice) {
    std::vector<int> list = choice.devices;
    if (list.empty() && choice.shares.empty()) list = usable_gpus();
    if (list.empty()) {
        list.resize(choice.shares.size());
        std::iota(list.begin(), list.end(), 0);
    }
    if (!choice.shares.empty() && list.size() != choice.shares.size())
        FAIL(usage, "-ts has {} number{}, and --device names {} GPU{}; give one number for each",
             choice.shares.size(), choice.shares.size() == 1 ? "" : "s", list.size(),
             list.size() == 1 ? "" : "s");
    if (list.size() > kMaxStages) list.resize(kMaxStages);
    return list;
}

std::unique_ptr<Backend> make_cpu(int threads, const DeviceChoice& choice) {
    if (choice.shares.empty())
        FAIL(usage,
             "-sm layer on the CPU simulates devices: say how many, and what each gets, with -ts, as in -ts "
             "3,2");
    return choice.shares.size() == 1 ? make_cpu_backend(threads)
                                     : make_cpu_stages(threads, static_cast<int>(choice.shares.size()));
}

}  // namespace

std::vector<double> parse_shares(const std::string& text) {
    std::vector<double> shares;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find_first_of(",/", begin), text.size());
        double share = 0;
        const char *first = text.data() + begin, *last = text.data() + end;
        const auto [rest, error] = std::from_chars(first, last, share);
        if (error != std::errc{} || rest != last || !(share > 0) || !(share < 1e12))
            FAIL(usage, "-ts: expected positive numbers like 3,2, one for each device, found '{}'",
                 printable(text));
        shares.push_back(share);
        begin = end + 1;
    }
    if (shares.size() > kMaxStages)
        FAIL(usage, "-ts: a model runs on {} devices at most, not {}", kMaxStages, shares.size());
    return shares;
}

void add_split_flags(ArgParser& parser, DeviceChoice& choice) {
    parser.value("-sm,--split-mode", "none|layer",
                 "layer: the layers of the model on several GPUs, of any kinds: those of --device, else all; "
                 "on the CPU as simulated devices. none: one device (default)",
                 [&choice](const std::string& v) { set_mode(choice, v); });
    parser.value("-ts,--tensor-split", "N,N[,...]",
                 "with -sm layer: how the layers are shared out, one number for each GPU; default: by free "
                 "memory",
                 [&choice](const std::string& v) {
                     choice.shares = parse_shares(v);
                     choice.by_layers = true;
                 });
}

std::unique_ptr<Backend> make_split_backend(const GpuOptions& gpu, int threads, const DeviceChoice& choice) {
    if (gpu.kind == GpuOptions::Kind::none) return make_cpu(threads, choice);
    const std::vector<int> devices = gpus_of(choice);
    const std::string reason = cuda_unavailable(devices.empty() ? 0 : devices.front());
    if (reason.empty()) return make_cuda_stages(devices, choice.peer_access);
    if (gpu.kind == GpuOptions::Kind::all)
        FAIL(device, "GPUs were asked for (-ngl, --device), but {}; use -ngl 0 with -ts to try it on the CPU",
             reason);
    if (cuda_built()) std::fprintf(stderr, "quern: running on the CPU: %s\n", reason.c_str());
    return make_cpu(threads, choice);
}

void require_one_split(const DeviceChoice& choice) {
    if (choice.by_layers && choice.ranks > 1)
        FAIL(usage, "-sm layer and -tp {}: a model is split one way; leave one of them out", choice.ranks);
}

void require_no_split(const DeviceChoice& choice, const char* what) {
    if (choice.by_layers) FAIL(usage, "{} takes a model on one device; leave out -sm layer and -ts", what);
}

}  // namespace quern
