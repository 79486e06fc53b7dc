// quantize-inspect --plan: bytes of a token, memory and ceilings, without a GPU and without weights.
#include <doctest/doctest.h>

#include "ggml-like/error.h"
#include "tools/inspect/cards.h"
#include "tools/inspect/plan.h"

namespace quern {
namespace {

const CostPlan::Component& component(const CostPlan& plan, const std::string& name) {
    for (const CostPlan::Component& c : plan.components)
        if (c.name == name) return c;
    throw std::runtime_error("no component " + name);
}

CostPlan of_35b(const EngineOptions& engine, const std::string& mix = "aeon", double bandwidth = 0) {
    return make_cost_plan(
        {.model = {}, .synthetic = "qwen3.6-35b-a3b", .mix = mix, .engine = engine, .bandwidth = bandwidth});
}

CostPlan of_27b(const std::string& mix) {
    return make_cost_plan(
        {.model = {}, .synthetic = "qwen3.6-27b-shape", .mix = mix, .engine = {.context = 2048}});
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("plan: the 35B model, 4.0 GB a token of which three quarters are DeltaNet and head in BF16") {
        const CostPlan plan = of_35b({.context = 2048});
        CHECK(component(plan, "DeltaNet").bytes == doctest::Approx(2.023e9).epsilon(0.005));
        CHECK(component(plan, "head").bytes == doctest::Approx(1.017e9).epsilon(0.005));
        CHECK(component(plan, "routed experts").bytes == doctest::Approx(0.566e9).epsilon(0.005));
        CHECK(component(plan, "DeltaNet").unquantized == component(plan, "DeltaNet").bytes);
        CHECK(component(plan, "routed experts").unquantized == 0);
        CHECK(plan.token_bytes() == doctest::Approx(4.02e9).epsilon(0.01));
        CHECK(plan.components.front().name == "DeltaNet");
        CHECK(component(of_35b({.context = 2048}, "fp8-head"), "head").unquantized == 0);
        // FP8 has half of the bytes, but for in_proj_a and in_proj_b; NVFP4 0.5625 a weight, plus nothing a matrix.
        const CostPlan nvidia = of_35b({.context = 2048}, "nvidia");
        CHECK(component(nvidia, "DeltaNet").bytes == doctest::Approx(1.014e9).epsilon(0.005));
        CHECK(component(nvidia, "head").bytes == doctest::Approx(0.286e9).epsilon(0.005));
        CHECK(component(nvidia, "routed experts").bytes == component(plan, "routed experts").bytes);
        const CostPlan fp8 = of_35b({.context = 2048}, "qwen-fp8");
        CHECK(component(fp8, "routed experts").bytes == doctest::Approx(1.007e9).epsilon(0.005));
        CHECK(component(fp8, "head").bytes == component(plan, "head").bytes);
    }

    TEST_CASE("plan: the dense 27B, 24.5 GB a token, 16.5 GB with its DeltaNet in NVFP4" *
              doctest::test_suite("slow")) {
        const CostPlan plan = of_27b("aeon");
        CHECK(component(plan, "DeltaNet").bytes == doctest::Approx(11.12e9).epsilon(0.005));
        CHECK(component(plan, "head").bytes == doctest::Approx(2.54e9).epsilon(0.005));
        CHECK(component(plan, "MLP").bytes ==
              doctest::Approx(64 * 3 * 5120.0 * 17408 * 0.5625).epsilon(1e-6));
        CHECK(component(plan, "recurrent state").bytes == doctest::Approx(0.302e9).epsilon(0.03));
        CHECK(plan.token_bytes() == doctest::Approx(24.6e9).epsilon(0.005));
        CHECK(plan.info.weight_bytes == doctest::Approx(26.78e9).epsilon(0.002));
        CHECK(plan.info.experts == 0);
        for (const CostPlan::Component& c : plan.components)
            CHECK(c.name.find("expert") == std::string::npos);
        CHECK(plan.cards[3].short_rate == doctest::Approx(4.8e12 / plan.token_bytes()));  // H200
        const CostPlan xs = of_27b("xs");
        CHECK(component(xs, "DeltaNet").bytes == doctest::Approx(3.13e9).epsilon(0.005));
        CHECK(xs.info.weight_bytes == doctest::Approx(18.79e9).epsilon(0.002));
    }

    TEST_CASE("plan: cards by memory and bandwidth" * doctest::test_suite("slow")) {
        const CostPlan plan = of_35b({.context = 2048}, "aeon", 1000);
        REQUIRE(plan.cards.size() == 5);
        for (const CostPlan::OnCard& c : plan.cards) {
            CAPTURE(c.name);
            CHECK(c.fits);
            CHECK(c.short_rate == doctest::Approx(c.bandwidth / plan.token_bytes()).epsilon(1e-6));
            CHECK(c.full_rate < c.short_rate);
        }
        CHECK(plan.cards[4].bandwidth == 1e12);
        CHECK(plan.cards[3].name == "H200");
        const CostPlan wide = of_35b({.context = 262144, .sequences = 4});
        CHECK(!wide.cards[0].fits);  // RTX 5090
        CHECK(wide.cards[3].fits);
        CHECK(describe(wide).find("does not fit: needs") != std::string::npos);
        const CostPlan nvfp4 = of_35b({.context = 2048, .kv_type = "nvfp4"});
        CHECK(256 * nvfp4.cards[0].memory.kv == 73 * plan.cards[0].memory.kv);
        REQUIRE(plan.formats.size() == 5);
        for (size_t i = 0; i < plan.formats.size(); ++i) {
            const CostPlan::OfFormat &f = plan.formats[i], &bf16 = plan.formats[0];
            CHECK(f.rooms.size() == 7);
            CHECK(f.rooms[0].context == 0);  // 22 GB of weights
            CHECK(f.rooms[6].context == 262144);
            CHECK(
                f.rooms[1].context * f.token_bytes ==
                doctest::Approx(static_cast<double>(bf16.rooms[1].context * bf16.token_bytes)).epsilon(0.02));
            if (i > 0) CHECK(f.rooms[2].sequences > bf16.rooms[2].sequences);
        }
        CHECK(plan.formats[1].name == "fp8");
        CHECK(plan.formats[1].token_bytes == 10320);
        CHECK(describe(plan).find("KV cache: context of one sequence, sequences of 32K") !=
              std::string::npos);
        CHECK_THROWS_AS(of_35b({.kv_type = "f32"}), Error);  // not on a GPU
        CHECK_THROWS_AS(of_35b({.kv_type = "q8_0"}), Error);
    }

    TEST_CASE("plan: two cards that share every layer have half of it each" * doctest::test_suite("slow")) {
        const auto plan_on = [](int ranks) {
            return make_cost_plan({.model = {},
                                   .synthetic = "qwen3.6-35b-a3b",
                                   .engine = {.context = 32768},
                                   .cards = {"rtx-3090"},
                                   .ranks = ranks});
        };
        const CostPlan one = plan_on(1), two = plan_on(2);
        REQUIRE(two.cards.size() == 1);
        const CostPlan::OnCard &whole = one.cards[0], &half = two.cards[0];
        CHECK(half.name == "RTX 3090");
        CHECK(half.bandwidth == 936e9);
        for (const char* part : {"DeltaNet", "routed experts", "attention", "head", "KV cache"}) {
            CAPTURE(part);
            CHECK(component(two, part).bytes ==
                  doctest::Approx(component(one, part).bytes / 2).epsilon(0.01));
        }
        CHECK(component(two, "router").bytes == component(one, "router").bytes);  // on both
        CHECK(2 * half.memory.kv == whole.memory.kv);
        const int64_t everywhere =
            int64_t{248320} * 2048 * 2 + int64_t{40} * 256 * 2048 * 2;  // embedding, routers
        CHECK(
            static_cast<double>(half.memory.weight_bytes() - everywhere) ==
            doctest::Approx(static_cast<double>(whole.memory.weight_bytes() - everywhere) / 2).epsilon(0.01));
        CHECK(half.short_rate > 1.9 * whole.short_rate);
        CHECK(two.formats.size() == 5);
        CHECK(2 * two.formats[0].token_bytes == one.formats[0].token_bytes);
        CHECK(describe(two).find("on each of 2 GPUs") != std::string::npos);
        CHECK(to_json(two)["ranks"] == 2);
        CHECK_THROWS_AS(plan_on(3), Error);
    }

    TEST_CASE("plan: cards that have some layers each need room for these alone" *
              doctest::test_suite("slow")) {
        const auto plan_on = [](const std::vector<double>& shares) {
            return make_cost_plan({.model = {},
                                   .synthetic = "qwen3.6-35b-a3b",
                                   .engine = {.context = 32768},
                                   .cards = {"RTX 5080"},
                                   .shares = shares});
        };
        const CostPlan one = plan_on({}), even = plan_on({1, 1}), uneven = plan_on({3, 1});
        CHECK(!one.cards[0].fits);
        CHECK(even.cards[0].fits);
        CHECK(!uneven.cards[0].fits);
        REQUIRE(even.cards[0].memory.stages.size() == 2);
        CHECK(static_cast<double>(even.cards[0].memory.weight_bytes()) ==
              doctest::Approx(static_cast<double>(one.cards[0].memory.weight_bytes())).epsilon(0.001));
        CHECK(even.token_bytes() == doctest::Approx(one.token_bytes()).epsilon(0.001));
        CHECK(describe(even).find("device 2 of 2 (layers 20-39, head)") != std::string::npos);
        CHECK(to_json(even)["stages"] == 2);
        CHECK_THROWS_AS(
            make_cost_plan(
                {.model = {}, .synthetic = "qwen3.6-35b-a3b", .cards = {}, .ranks = 2, .shares = {1, 1}}),
            Error);
    }

    TEST_CASE("plan: cards by their names") {
        for (const char* name : {"rtx-3090", "RTX 3090", "rtx3090"})
            CHECK(find_card(name).mebibytes == 24576);
        for (const Card& card : usual_cards()) CHECK(find_card(card.name).name == card.name);
        CHECK_THROWS_AS(find_card("gtx 1080"), Error);
        CHECK_THROWS_AS(find_card(""), Error);
    }

    TEST_CASE("plan: a checkpoint's files, and JSON") {
        const CostPlan plan = make_cost_plan(
            {.model = QUERN_SOURCE_DIR "/tests/vectors/parity/base/ct", .engine = {.context = 64}});
        CHECK(plan.info.layers == 4);
        const auto j = to_json(plan);
        CHECK(j["components"].size() == plan.components.size());
        CHECK(j["cards"][0]["fits"] == true);
    }
}

}  // namespace quern
