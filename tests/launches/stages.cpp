// A model by layers on different cards: every call is one that CUDA takes, with and without access to each other's memory. Drafts on
// one card.
#include <doctest/doctest.h>

#include "cuda_stand_in/stand_in.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "models/weight_placement.h"
#include "tools/engine/engine.h"

namespace quern {
namespace {

using cuda_stand_in::kA100, cuda_stand_in::kH200, cuda_stand_in::kRtx5090;

/// Runs two prompts and their answers, from kept states, too. Kernels compute nothing: all logits are zeros.
void run_on(const std::vector<int>& devices, bool peers, DrafterKind drafts = DrafterKind::none) {
    cuda_stand_in::allow_peers(peers);
    const auto group = make_cuda_stages(devices);
    const std::string description = group->description();
    CAPTURE(description);
    CHECK((description.find("through host memory") != std::string::npos) == !peers);
    OpenOptions options{.tokenizer = false};
    if (drafts == DrafterKind::mtp) options.mtp = MtpUse::required;
    if (drafts == DrafterKind::dflash) options.draft_model = "new", options.draft_format = DenseFormat::fp8;
    const auto model = open_for(*group, {1, 2, 1}, options,
                                [](const OpenOptions& o) { return open_synthetic("tiny", "aeon", o); });
    // One after the other: the stand-in is for one thread.
    for (int s = 0; s < group->stages(); ++s) place_weights(model->of_stage(s), group->of_stage(s));
    Engine engine(*model, *group,
                  {.context = 512, .sequences = 2, .cache_bytes = 64 << 20, .speculation = {.kind = drafts}});
    cuda_stand_in::take_record();
    for (int turn = 0; turn < 2; ++turn) {
        std::vector<RequestId> ids;
        for (int i = 0; i < 2; ++i) {
            Request r{.prompt = std::vector<int32_t>(300, 5 + i)};
            r.sampling.temperature = 0;
            r.max_tokens = 5;
            r.drafts.full = drafts != DrafterKind::none;
            ids.push_back(engine.submit(std::move(r)));
        }
        while (engine.step()) {
        }
        for (const RequestId id : ids) {
            const Result result = engine.take(id);
            CHECK(result.error == "");
            CHECK(result.tokens.size() == 5);
            CHECK(result.cached_tokens == (turn == 0 ? 0 : 256));
        }
    }
    CHECK(!cuda_stand_in::take_record().launches.empty());
}

TEST_CASE("stages: three different cards run a model together") {
    run_on({kH200, kRtx5090, kA100}, true);
    run_on({kA100, kH200, kRtx5090}, false);
    for (const DrafterKind drafts : {DrafterKind::mtp, DrafterKind::dflash}) {
        run_on({kH200, kRtx5090, kA100}, true, drafts);
        run_on({kA100, kH200, kRtx5090}, false, drafts);
    }
    cuda_stand_in::allow_peers(true);
}

TEST_CASE("drafts: the inputs of a step and of the pass that is queued behind it are one launch") {
    const auto backend = make_cuda_backend(kH200);
    const auto model = open_synthetic("tiny", "aeon", {.tokenizer = false, .mtp = MtpUse::required});
    place_weights(*model, *backend);
    Engine engine(*model, *backend,
                  {.context = 512, .cache_bytes = 64 << 20, .speculation = {.kind = DrafterKind::mtp}});
    cuda_stand_in::take_record();
    Request r{.prompt = std::vector<int32_t>(70, 5)};
    r.sampling.temperature = 0;
    r.max_tokens = 60;
    r.drafts.full = true;
    const RequestId id = engine.submit(std::move(r));
    while (engine.step()) {
    }
    CHECK(engine.take(id).drafted > 0);
    int64_t together = 0;
    for (const auto& launch : cuda_stand_in::take_record().launches)
        together += launch.kernel->name == "copy_inputs_kernel";
    CHECK(together > 5);
}

}  // namespace
}  // namespace quern
