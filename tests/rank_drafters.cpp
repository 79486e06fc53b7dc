// Drafts on a model that several ranks run: the first rank drafts for all, and no answer changes.
#include <doctest/doctest.h>

#include "ggml-like/error.h"
#include "rank_models.h"
#include "tools/engine/memory_plan.h"

namespace quern {
namespace {

using test::random_ids;

const std::string kDemo = test::source_dir() + "/models/demo";
constexpr size_t kPrompts = 4;

struct Setting {
    DrafterKind kind;
    int64_t draft_head_bytes;  // 0: drafts by the whole head
};

std::unique_ptr<Model> open(Backend& backend, const Setting& s) {
    return load_model(kDemo, backend,
                      {.tokenizer = false,
                       .mtp = s.kind == DrafterKind::mtp ? MtpUse::required : MtpUse::none,
                       .draft_head_bytes = s.draft_head_bytes,
                       .draft_format = s.draft_head_bytes > 0 ? DenseFormat::fp8 : DenseFormat::as_stored,
                       .draft_model = s.kind == DrafterKind::dflash ? kDemo + "/dflash" : ""});
}

/// Prompts of one token to five steps; every other one is seeded.
Request request(const Model& model, size_t i) {
    Request r;
    r.prompt = random_ids(model, 1 + 100 * i, static_cast<unsigned>(i));
    r.max_tokens = 16;
    r.sampling.temperature = i % 2 == 0 ? 0 : 0.8f;
    r.sampling.seed = i;
    r.drafts.full = true;
    return r;
}

using Answers = std::vector<std::vector<int32_t>>;

/// Each request alone, all of them at once, then what follows each answer from its kept state.
std::vector<Answers> all_answers(Engine& engine) {
    std::vector<Answers> out(3);
    const auto take = [&](RequestId id) {
        while (!engine.finished(id)) engine.step();
        Result result = engine.take(id);
        CHECK(result.error == "");
        return std::move(result.tokens);
    };
    for (size_t i = 0; i < kPrompts; ++i) {
        Request alone = request(engine.model(), i);
        alone.use_cache = false;
        out[0].push_back(take(engine.submit(std::move(alone))));
    }
    std::vector<RequestId> ids;
    for (size_t i = 0; i < kPrompts; ++i) ids.push_back(engine.submit(request(engine.model(), i)));
    for (const RequestId id : ids) out[1].push_back(take(id));
    for (size_t i = 0; i < kPrompts; ++i) {
        Request next = request(engine.model(), i);
        const std::vector<int32_t>& answer = out[1][i];
        next.prompt.insert(next.prompt.end(), answer.begin(), answer.end());
        next.prompt.push_back(7);
        out[2].push_back(take(engine.submit(std::move(next))));
    }
    return out;
}

EngineOptions options(DrafterKind kind) {
    return {.context = 512,
            .sequences = kPrompts,
            .step_tokens = 64,
            .cache_bytes = 64 << 20,
            .speculation = {.kind = kind, .draft_max = 4}};
}

void check_drafts(const std::function<std::unique_ptr<Backend>()>& backend, const Setting& s) {
    const auto on = backend();
    const auto model = open(*on, s);
    std::vector<Answers> expected;
    {
        Engine none(*model, *on, options(DrafterKind::none));
        expected = all_answers(none);
    }
    Engine engine(*model, *on, options(s.kind));
    CHECK(engine.notes().empty());
    const std::vector<Answers> found = all_answers(engine);
    CHECK(found == expected);
    CHECK(found[1] == found[0]);
    CHECK(engine.cache_stats().hits > 0);
    int64_t accepted = 0, rounds = 0;
    Request watched = request(*model, 0);
    watched.on_round = [&](int64_t, std::span<const int32_t>, int64_t kept) {
        ++rounds;
        accepted += kept;
    };
    engine.run(std::move(watched));
    CHECK(rounds > 0);
    CHECK(accepted > 0);
}

TEST_SUITE("cpu") {
    TEST_CASE("rank drafters: MTP and DFlash change no answer, on two and four ranks" *
              doctest::test_suite("slow")) {
        const auto check = [](const Setting& s, int ranks) {
            const std::string drafter = drafter_name(s.kind);
            CAPTURE(drafter);
            CAPTURE(s.draft_head_bytes);
            CAPTURE(ranks);
            check_drafts([&] { return make_cpu_backends(2, ranks); }, s);
        };
        for (const int64_t head : {0, 300'000})
            for (const DrafterKind kind : {DrafterKind::mtp, DrafterKind::dflash}) check({kind, head}, 2);
        check({DrafterKind::mtp, 300'000}, 4);
        check({DrafterKind::dflash, 0}, 4);
    }

    TEST_CASE("rank drafters: nor on devices, whose plans are captured" * doctest::test_suite("slow")) {
        for (const DrafterKind kind : {DrafterKind::mtp, DrafterKind::dflash}) {
            const std::string drafter = drafter_name(kind);
            CAPTURE(drafter);
            check_drafts([] { return std::move(test::DeviceRanks(2).group); }, {kind, 0});
        }
    }

    TEST_CASE("rank drafters: the first rank alone has their weights, and the plan counts them") {
        for (const Setting s : {Setting{DrafterKind::mtp, 0}, Setting{DrafterKind::dflash, 300'000}}) {
            test::DeviceRanks ranks(2);
            const auto model = open(*ranks.group, s);
            const MemoryPlan plan = make_memory_plan(*model, *ranks.group, options(s.kind), false);
            CHECK(ranks.each[0]->used == plan.weight_bytes());
            CHECK(ranks.each[1]->used < ranks.each[0]->used);
            for (const WeightUse& use : model->of_rank(1).weights().uses) CHECK(!use.draft);
        }
    }

    TEST_CASE("rank drafters: no rank has the logits of drafts that the short head makes") {
        const auto on = make_cpu_backends(2, 2);
        const auto model = open(*on, {DrafterKind::mtp, 300'000});
        REQUIRE(model->info().draft_tokens);
        Engine engine(*model, *on, options(DrafterKind::mtp));
        Request r = request(*model, 0);
        r.on_draft_logits = [](std::span<const float>) {};
        CHECK_THROWS_WITH_AS(engine.submit(std::move(r)), doctest::Contains("--draft-head full"), Error);
    }
}

}  // namespace
}  // namespace quern
