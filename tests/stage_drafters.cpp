// Drafts on a model that several devices hold by layers: the last one drafts, and drafts and answers have the bits of one device.
#include <doctest/doctest.h>

#include "ggml-like/cuda_backend.h"
#include "lazy_backend.h"
#include "stage_models.h"
#include "tools/engine/memory_plan.h"

namespace quern {
namespace {

using test::random_ids;
using Shares = std::vector<double>;

struct Setting {
    DrafterKind kind;
    int64_t draft_head_bytes = 0;  // 0: drafts by the whole head
    std::string checkpoint = test::source_dir() + "/models/demo";
    bool tokenizer = false, vision = false;
    DenseFormat dense = DenseFormat::as_stored;
};

OpenOptions open_options(const Setting& s) {
    OpenOptions o{.tokenizer = s.tokenizer,
                  .dense = s.dense,
                  .mtp = s.kind == DrafterKind::mtp ? MtpUse::required : MtpUse::none,
                  .vision = s.vision};
    o.draft_head_bytes = s.draft_head_bytes;
    if (s.draft_head_bytes > 0) o.draft_format = DenseFormat::fp8;
    if (s.kind == DrafterKind::dflash) o.draft_model = s.checkpoint + "/dflash";
    return o;
}

EngineOptions engine_options(DrafterKind kind) {
    return {.context = 512,
            .sequences = 3,
            .step_tokens = 64,
            .cache_bytes = 64 << 20,
            .speculation = {.kind = kind, .draft_max = 4}};
}

/// An answer, and all that was drafted for it.
struct Drafted {
    std::vector<int32_t> tokens, drafts;
    std::vector<int64_t> rounds;  // of each: its position, drafted tokens, and those that were kept
    std::vector<float> logits;    // of drafts
    std::string error;
    int64_t cached = 0, kept = 0;
    friend bool operator==(const Drafted&, const Drafted&) = default;
};

ImagePtr image_for(const Model& model, const Engine& engine) {
    Image image{.width = 96, .height = 64, .rgb = std::vector<uint8_t>(96 * 64 * 3)};
    std::mt19937 random(4);
    for (uint8_t& byte : image.rgb) byte = static_cast<uint8_t>(random());
    return std::make_shared<const ImagePart>(model.read_image(std::move(image), engine.image_sizes()));
}

Request request(Engine& engine, size_t i, Drafted& to) {
    Request r;
    r.prompt = random_ids(engine.model(), 40 + 120 * i, static_cast<unsigned>(i));
    if (i > 0 && engine.model().info().vision) {
        r.images = {image_for(engine.model(), engine)};
        r.prompt.insert(r.prompt.end() - 20, r.images[0]->keys.begin(), r.images[0]->keys.end());
    }
    r.max_tokens = 20;
    r.sampling.temperature = i == 1 ? 0.8f : 0;
    r.sampling.seed = i;
    r.drafts.full = true;
    if (i == 2) return r;  // nobody watches: several together, by the short head
    r.on_draft_logits = [&to](std::span<const float> row) {
        to.logits.insert(to.logits.end(), row.begin(), row.end());
    };
    r.on_round = [&to](int64_t position, std::span<const int32_t> drafts, int64_t kept) {
        to.drafts.insert(to.drafts.end(), drafts.begin(), drafts.end());
        to.rounds.insert(to.rounds.end(), {position, static_cast<int64_t>(drafts.size()), kept});
        to.kept += kept;
    };
    return r;
}

void take(Engine& engine, RequestId id, Drafted& to) {
    while (!engine.finished(id)) engine.step();
    Result result = engine.take(id);
    to.tokens = std::move(result.tokens);
    to.error = result.error;
    to.cached = result.cached_tokens;
}

/// Each request alone, all together, and what follows the longest from its kept state.
std::vector<Drafted> answers(Model& model, Backend& backend, DrafterKind kind) {
    Engine engine(model, backend, engine_options(kind));
    CHECK(engine.notes().empty());
    std::vector<Drafted> out(7);
    for (size_t i = 0; i < 3; ++i) {
        Request r = request(engine, i, out[i]);
        r.use_cache = false;
        take(engine, engine.submit(std::move(r)), out[i]);
    }
    std::vector<RequestId> ids;
    for (size_t i = 0; i < 3; ++i) ids.push_back(engine.submit(request(engine, i, out[3 + i])));
    for (size_t i = 0; i < 3; ++i) take(engine, ids[i], out[3 + i]);
    Request next = request(engine, 2, out[6]);
    next.prompt.insert(next.prompt.end(), out[5].tokens.begin(), out[5].tokens.end());
    take(engine, engine.submit(std::move(next)), out[6]);
    CHECK(out[6].cached > 0);
    return out;
}

std::vector<Drafted> answers(const Setting& s, const Shares& shares, std::unique_ptr<Backend> backend) {
    const auto model = load_model(s.checkpoint, *backend, open_options(s), {}, shares);
    if (s.dense != DenseFormat::as_stored) requantize_weights(*model, *backend);
    return answers(*model, *backend, s.kind);
}

void check(const Setting& s, const std::vector<Shares>& splits) {
    const std::string kind = drafter_name(s.kind);
    CAPTURE(kind);
    CAPTURE(s.checkpoint);
    CAPTURE(s.draft_head_bytes);
    for (const bool device : {false, true}) {
        CAPTURE(device);
        const auto on = [&](size_t count) { return test::SplitModel::on(static_cast<int>(count), device); };
        const std::vector<Drafted> one = answers(s, {1}, on(1));
        int64_t kept = 0;
        for (const Drafted& d : one) {
            CHECK(d.error == "");
            kept += d.kept;
        }
        CHECK(!one[0].logits.empty());
        if (s.checkpoint.ends_with("demo")) CHECK(kept > 0);
        for (size_t i = 0; i < 3; ++i) CHECK(one[3 + i].tokens == one[i].tokens);
        for (const Shares& shares : splits) {
            CAPTURE(shares.size());
            CAPTURE(shares[0]);
            CHECK(answers(s, shares, on(shares.size())) == one);
        }
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("stage drafters: MTP drafts and answers as on one device" * doctest::test_suite("slow")) {
        check({DrafterKind::mtp}, {{1, 1}, {1, 3, 2}});
        check({.kind = DrafterKind::mtp, .draft_head_bytes = 300'000, .tokenizer = true}, {{3, 1}});
        check({.kind = DrafterKind::mtp, .dense = DenseFormat::fp8}, {{1, 1}});
    }

    TEST_CASE("stage drafters: MTP, where head and embedding are one; where images are read" *
              doctest::test_suite("slow")) {
        const std::string tied = test::parity("tied_text/bf16");
        check({.kind = DrafterKind::mtp, .checkpoint = tied}, {{1, 1}, {1, 1, 1}});
        check({.kind = DrafterKind::mtp, .checkpoint = tied, .dense = DenseFormat::fp8}, {{1, 1}});
        check({.kind = DrafterKind::mtp, .vision = true}, {{1, 1}, {2, 1, 2}});
    }

    TEST_CASE("stage drafters: DFlash reads layers of all devices" * doctest::test_suite("slow")) {
        // It taps layers 1, 4 and 6 of 8.
        check({DrafterKind::dflash}, {{1, 1}, {1, 7}, {3, 2, 3}, {7, 1}});
        check({.kind = DrafterKind::dflash, .draft_head_bytes = 300'000, .tokenizer = true}, {{1, 1, 1, 1}});
        check({.kind = DrafterKind::dflash, .vision = true}, {{1, 1}});
    }

    TEST_CASE("stage drafters: devices that work late change nothing" * doctest::test_suite("slow")) {
        for (const DrafterKind kind : {DrafterKind::mtp, DrafterKind::dflash}) {
            const std::string name = drafter_name(kind);
            CAPTURE(name);
            const std::vector<Drafted> one = answers({kind}, {1}, test::device());
            for (const int stages : {2, 3}) {
                CAPTURE(stages);
                CHECK(answers({kind}, Shares(static_cast<size_t>(stages), 1),
                              std::move(test::LazyStages(stages).group)) == one);
            }
        }
    }

    TEST_CASE("stage drafters: the last device has their weights and states, as its memory plan says") {
        for (const Setting& s :
             {Setting{DrafterKind::mtp}, Setting{.kind = DrafterKind::dflash, .draft_head_bytes = 300'000},
              Setting{.kind = DrafterKind::mtp, .checkpoint = test::parity("tied_text/bf16")}}) {
            CAPTURE(s.checkpoint);
            test::DeviceStages stages(3);
            const auto model = open_for(*stages.group, {1, 1, 1}, open_options(s),
                                        [&](const OpenOptions& o) { return open_model(s.checkpoint, o); });
            const EngineOptions options = engine_options(s.kind);
            const MemoryPlan plan = make_memory_plan(*model, *stages.group, options, false);
            place_weights(*model, *stages.group);
            std::vector<int64_t> placed;
            for (size_t i = 0; i < 3; ++i) {
                CAPTURE(i);
                placed.push_back(stages.each[i]->used);
                CHECK(placed[i] == plan.stages[i].weight_bytes());
                bool drafts = false;
                for (const WeightUse& use : model->of_stage(static_cast<int>(i)).weights().uses)
                    drafts |= use.draft;
                CHECK(drafts == (i == 2));
                bool state = false;
                for (const StateSpec& spec : plan.stages[i].specs)
                    state |= spec.layer >= static_cast<int>(model->info().layers);
                CHECK(state == (i == 2));
            }
            const Engine engine(*model, *stages.group, options);
            for (size_t i = 0; i < 3; ++i) {
                CAPTURE(i);
                CHECK(stages.each[i]->used - placed[i] ==
                      plan.stages[i].state_bytes() + plan.stages[i].scratch_bytes());
            }
        }
    }
}

TEST_SUITE("gpus") {
    TEST_CASE("gpu stage drafters: MTP and DFlash draft and answer on two GPUs as on one") {
        for (const Setting& s :
             {Setting{DrafterKind::mtp}, Setting{.kind = DrafterKind::mtp, .dense = DenseFormat::fp8},
              Setting{.kind = DrafterKind::mtp, .vision = true}, Setting{DrafterKind::dflash}}) {
            const std::string kind = drafter_name(s.kind);
            CAPTURE(kind);
            const std::vector<Drafted> one = answers(s, {1}, make_cuda_stages({0}));
            for (const Drafted& d : one) CHECK(d.error == "");
            CHECK(answers(s, {1, 1}, make_cuda_stages({0, 1})) == one);
            CHECK(answers(s, {3, 1}, make_cuda_stages({1, 0})) == one);
        }
    }
}

}  // namespace
}  // namespace quern
