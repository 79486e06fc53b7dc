// Groups of GPUs take the memory that was planned, and are refused where they would answer wrongly.
#include <doctest/doctest.h>

#include <string>

#include "cuda_stand_in/stand_in.h"
#include "ggml-like/backend.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "models/model_group.h"
#include "models/weight_placement.h"
#include "tools/inspect/plan.h"

namespace quern {
namespace {

using cuda_stand_in::kH200;

std::string refusal(const std::vector<int>& devices, const RankOptions& options) {
    try {
        return make_cuda_backends(devices, options)->description();
    } catch (const Error& e) {
        CHECK(e.kind() == ErrorKind::device);
        return e.what();
    }
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("rank groups: cards of different kinds are refused by their names") {
    const std::string error = refusal({kH200, cuda_stand_in::kA100}, {.test = false});
    INFO(error);
    CHECK(has(error, "GPU 0 is an "));
    CHECK(has(error, cuda_stand_in::devices()[kH200].name));
    CHECK(has(error, cuda_stand_in::devices()[cuda_stand_in::kA100].name));
}

TEST_CASE("rank groups: wrong sums are refused, for the stand-in adds nothing") {
    const std::string direct = refusal({kH200, kH200}, {.peer_access = true}),
                      through_host = refusal({kH200, kH200}, {.peer_access = false});
    INFO(direct);
    INFO(through_host);
    CHECK(has(direct, "adds up wrong: number 0 of 16"));
    CHECK(has(direct, "--no-peer-access"));
    CHECK(has(through_host, "adds up wrong"));
    CHECK(has(through_host, "cannot run one model together"));
}

TEST_CASE("rank groups: two ranks take what was planned for two cards, within 1 %") {
    const auto group = make_cuda_backends({kH200, kH200}, {.test = false});
    const auto model = open_ranks(2, {.tokenizer = false}, [](const OpenOptions& own) {
        return open_synthetic("qwen3.6-35b-a3b", "aeon", own);
    });
    const int64_t before = group->of_rank(0).memory_info().free_bytes;
    place_weights(*model, *group);
    const int64_t taken =
        before - group->of_rank(0).memory_info().free_bytes;  // by both: they are on one card
    const CostPlan plan = make_cost_plan(
        {.model = {}, .synthetic = "qwen3.6-35b-a3b", .engine = {.context = 4096}, .cards = {}, .ranks = 2});
    CHECK(static_cast<double>(taken) / 2 ==
          doctest::Approx(static_cast<double>(plan.cards[0].memory.weight_bytes())).epsilon(0.01));
}

TEST_CASE("rank groups: more GPUs than mailboxes have places for are refused") {
    CHECK(has(refusal(std::vector<int>(9, kH200), {.test = false}), "8 GPUs at most, not 9"));
}

}  // namespace
}  // namespace quern
