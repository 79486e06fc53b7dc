// Several GPUs as one backend: ranks that share every layer, stages that have some of them each.
#include <cstdio>
#include <optional>
#include <utility>

#include "ggml-like/backend_group.h"
#include "ggml-like/check.h"
#include "ggml-like/cuda/comm/devices.h"
#include "ggml-like/cuda/comm/handover.h"
#include "ggml-like/cuda/comm/sum_test.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/stage_group.h"

namespace quern {
namespace {

/// Nothing if a message between them got lost.
std::unique_ptr<Backend> make_ranks(const std::vector<int>& devices, cuda::comm::Link link, bool test,
                                    const std::string& why) {
    const auto peers = std::make_shared<cuda::comm::PeerGroup>(devices, link);
    std::vector<std::unique_ptr<Backend>> ranks;
    for (const int device : devices)
        ranks.push_back(cuda::comm::make_rank(device, peers, static_cast<int>(ranks.size())));
    std::string note;
    if (test) {
        const std::optional<std::string> tested = cuda::comm::test_sums(*peers);
        if (!tested) return nullptr;
        note = why.empty() ? *tested : fmt::format("{} through host memory ({})", *tested, why);
    }
    ranks.front()->use_on_this_thread();
    return std::make_unique<BackendGroup>(std::move(ranks), peers, note);
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backends(const std::vector<int>& devices, const RankOptions& options) {
    using cuda::comm::Link;
    for (const int device : devices)
        if (const std::string reason = cuda_unavailable(device); !reason.empty()) FAIL(device, "{}", reason);
    if (devices.size() == 1) return make_cuda_backend(devices[0]);
    cuda::comm::require_one_kind(devices);
    std::string why =
        options.peer_access ? cuda::comm::no_peer_access(devices) : "peer access is switched off";
    if (why.empty()) {
        if (auto group = make_ranks(devices, Link::peer_access, options.test, why)) return group;
        why = "a sum by peer access did not come within 2 s";
        std::fprintf(stderr, "quern: %s; the GPUs add up through host memory, which is slower\n",
                     why.c_str());
    }
    if (auto group = make_ranks(devices, Link::host_memory, options.test, why)) return group;
    FAIL(device, "these GPUs cannot run one model together: {}, and no sum came through host memory", why);
}

namespace {

std::unique_ptr<StageGroup> connect_stages(const std::vector<int>& devices, bool directly) {
    std::vector<std::unique_ptr<Backend>> stages;
    std::string note;
    for (size_t s = 0; s < devices.size(); ++s) {
        const bool reads = s > 0 && directly && cuda::comm::enable_reading(devices[s], devices[s - 1]);
        if (s > 0 && !reads) note = "hidden states go through host memory";
        stages.push_back(cuda::comm::make_stage(devices[s], reads));
    }
    return std::make_unique<StageGroup>(std::move(stages), note);
}

}  // namespace

std::unique_ptr<Backend> make_cuda_stages(const std::vector<int>& devices, bool peer_access) {
    constexpr int64_t kTestBytes = 4 << 20;
    for (const int device : devices)
        if (const std::string reason = cuda_unavailable(device); !reason.empty()) FAIL(device, "{}", reason);
    if (devices.size() == 1) return make_cuda_backend(devices[0]);
    auto group = connect_stages(devices, peer_access);
    if (first_wrong_link(*group, kTestBytes) < 0) return group;
    group.reset();
    group = connect_stages(devices, false);
    const int wrong = first_wrong_link(*group, kTestBytes);
    if (wrong < 0) return group;
    const auto s = static_cast<size_t>(wrong);
    FAIL(device, "rows that GPU {} sends to GPU {} arrive wrong; choose other GPUs with --device", devices[s],
         devices[s + 1]);
}

}  // namespace quern
