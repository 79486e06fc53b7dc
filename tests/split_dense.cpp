// --dense and --vision fp8 on several devices: ranks and stages get the numbers that one device gets.
#include <doctest/doctest.h>

#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "models/shard.h"
#include "rank_models.h"
#include "stage_models.h"
#include "tools/common/loading.h"
#include "tools/engine/memory_plan.h"

namespace quern {
namespace {

using test::Outcome, test::random_ids, test::run, test::run_together;
using Shares = std::vector<double>;

constexpr DenseFormat kFormats[] = {DenseFormat::fp8, DenseFormat::nvfp4};

/// What a prompt gets alone and beside others, before the weights change and after.
struct Bits {
    Outcome stored, alone;
    std::vector<Outcome> together;
    friend bool operator==(const Bits&, const Bits&) = default;
};

Bits bits_of(const std::string& checkpoint, DenseFormat format, const Shares& shares,
             std::unique_ptr<Backend> backend) {
    const auto model = load_model(checkpoint, *backend, {.tokenizer = false, .dense = format}, {}, shares);
    CHECK(changes_later(*model));
    const EngineOptions options{.context = 256, .sequences = 3, .step_tokens = 64};
    const auto prompt = random_ids(*model, 90, 5);
    Bits bits;
    {
        Engine engine(*model, *backend, options);
        bits.stored = run(engine, prompt, true);
    }
    LoadProgress progress;
    requantize_weights(*model, *backend, [&](const LoadProgress& p) { progress = p; });
    CHECK(progress.bytes_total > 0);
    CHECK(progress.bytes_done == progress.bytes_total);
    CHECK(!changes_later(*model));
    Engine engine(*model, *backend, options);
    bits.alone = run(engine, prompt, true);
    bits.together = run_together(engine, {random_ids(*model, 20, 1), prompt, random_ids(*model, 130, 2)});
    CHECK(bits.alone.error == "");
    for (const Outcome& o : bits.together) CHECK(o.error == "");
    const auto tokens = static_cast<std::ptrdiff_t>(bits.together[1].tokens.size());
    CHECK(std::equal(bits.alone.tokens.begin(), bits.alone.tokens.begin() + tokens,
                     bits.together[1].tokens.begin()));
    CHECK(bits.alone.logits != bits.stored.logits);
    return bits;
}

/// |a - b| / |b|
double difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double squares = 0, all = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        squares += std::pow(static_cast<double>(a[i]) - b[i], 2);
        all += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(squares / all);
}

std::string error_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

TEST_SUITE("cpu") {
    TEST_CASE("split dense: by layers the bits of one device") {
        struct Case {
            const char* checkpoint;
            std::vector<Shares> splits;
        };
        for (const auto& [checkpoint, splits] : std::vector<Case>{{"base/ct", {{1, 1}}},
                                                                  {"deep/bf16", {{3, 2}, {5, 2, 1}}},
                                                                  {"tied_text/bf16", {{1, 1}, {1, 1, 2}}},
                                                                  {"dense/bf16", {{1, 1}}}}) {
            const std::string name = test::parity(checkpoint);
            CAPTURE(name);
            for (const DenseFormat format : kFormats)
                for (const bool device : {false, true}) {
                    CAPTURE(device);
                    const Bits one = bits_of(name, format, {1}, test::SplitModel::on(1, device));
                    for (const Shares& shares : splits) {
                        CAPTURE(shares.size());
                        const auto count = static_cast<int>(shares.size());
                        CHECK(bits_of(name, format, shares, test::SplitModel::on(count, device)) == one);
                    }
                }
        }
    }

    TEST_CASE("split dense: ranks have parts of the whole matrices' new form") {
        for (const bool dense : {false, true})
            for (const DenseFormat format : kFormats) {
                CAPTURE(dense);
                CAPTURE(std::string(dense_format_name(format)));
                const std::string checkpoint = test::rank_model(dense).in("bf16");
                const Bits one = bits_of(checkpoint, format, {}, test::cpu());
                for (const int ranks : {2, 4}) {
                    CAPTURE(ranks);
                    const Bits several = bits_of(checkpoint, format, {}, make_cpu_backends(2, ranks));
                    CHECK(several.alone.tokens == one.alone.tokens);
                    CHECK(difference(several.alone.logits, one.alone.logits) < 1e-6);
                    CHECK(difference(one.alone.logits, one.stored.logits) > 1e-3);
                    const Bits device =
                        bits_of(checkpoint, format, {}, std::move(test::DeviceRanks(ranks).group));
                    CHECK(device.alone == several.alone);
                }
            }
    }

    TEST_CASE("split dense: rank 0 of several drafts by the new form of the whole head") {
        const std::string demo = test::source_dir() + "/models/demo";
        const auto drafts = [&](std::unique_ptr<Backend> backend) {
            OpenOptions options{.tokenizer = false, .dense = DenseFormat::fp8, .mtp = MtpUse::required};
            options.draft_head_bytes = 0;
            const auto model = load_model(demo, *backend, options);
            requantize_weights(*model, *backend);
            Engine engine(*model, *backend,
                          {.context = 256, .speculation = {.kind = DrafterKind::mtp, .draft_max = 3}});
            std::vector<float> logits;
            Request r{.prompt = random_ids(*model, 60, 3)};
            r.max_tokens = 12;
            r.sampling.temperature = 0;
            r.drafts.full = true;
            r.on_draft_logits = [&](std::span<const float> row) {
                logits.insert(logits.end(), row.begin(), row.end());
            };
            CHECK(engine.run(std::move(r)).error == "");
            REQUIRE(!logits.empty());
            return logits;
        };
        CHECK(difference(drafts(make_cpu_backends(2, 2)), drafts(test::cpu())) < 1e-5);
    }

    TEST_CASE("split dense: no device holds more than its plan and its weights as stored") {
        const std::string checkpoint = test::rank_model().in("bf16");
        test::DeviceRanks ranks(2);
        const auto model = open_for(*ranks.group, {}, {.tokenizer = false, .dense = DenseFormat::fp8},
                                    [&](const OpenOptions& o) { return open_model(checkpoint, o); });
        const int64_t planned = make_memory_plan(*model, *ranks.group, {.context = 64}, false).weight_bytes();
        const int64_t extra = extra_bytes_as_stored(*model, *ranks.group);
        CHECK(extra > 0);
        place_weights(*model, *ranks.group);
        for (const test::CountedBackend* rank : ranks.each) CHECK(rank->used == planned + extra);
        requantize_weights(*model, *ranks.group);
        for (const test::CountedBackend* rank : ranks.each) CHECK(rank->used == planned);

        for (const char* name : {"deep/bf16", "tied_text/bf16"}) {
            test::DeviceStages stages(3);
            const auto split =
                open_for(*stages.group, {1, 1, 1}, {.tokenizer = false, .dense = DenseFormat::fp8},
                         [&](const OpenOptions& o) { return open_model(test::parity(name), o); });
            const MemoryPlan plan = make_memory_plan(*split, *stages.group, {.context = 64}, false);
            std::vector<int64_t> stored;
            for (int s = 0; s < 3; ++s)
                stored.push_back(plan.of_stage(s).weight_bytes() +
                                 extra_bytes_as_stored(split->of_stage(s), stages.group->of_stage(s)));
            place_weights(*split, *stages.group);
            for (size_t s = 0; s < 3; ++s) CHECK(stages.each[s]->used == stored[s]);
            requantize_weights(*split, *stages.group);
            for (size_t s = 0; s < 3; ++s)
                CHECK(stages.each[s]->used == plan.of_stage(static_cast<int>(s)).weight_bytes());
        }
    }

    TEST_CASE("split dense: what a rank cannot have in whole blocks is refused") {
        const std::vector<uint16_t> values(4 * 48, 0x3f80);
        for (const DenseFormat format : kFormats) {
            WeightSegment s;
            s.name = "w", s.rows = 4, s.cols = 48, s.data = values.data();
            Weight w("L0.attn.out_proj", {s});
            ModelWeights list;
            list.uses.push_back({.group = "attention", .matrix = &w, .projection = true});
            list.plan_dense(format);
            list.begin_parts();
            w = take_shard(w, {.rank = 1, .of = 2, .axis = ShardAxis::columns});
            const std::string error = error_of([&] { list.plan_parts(); });
            if (format == DenseFormat::fp8)
                CHECK(error == "");
            else
                CHECK(
                    error ==
                    "--dense nvfp4: of L0.attn.out_proj each rank has 24 columns, which are no whole blocks "
                    "of 16; choose --dense fp8, or fewer ranks");
        }
    }

    TEST_CASE("split dense: the cost is that of one device" * doctest::test_suite("slow")) {
        const auto cost = [](const DeviceChoice& devices) {
            const LoadedModel loaded = load_and_start({.gpu = GpuOptions::none,
                                                       .devices = devices,
                                                       .dense = DenseFormat::fp8,
                                                       .engine = {.context = 256}});
            REQUIRE(loaded.dense_cost);
            return *loaded.dense_cost;
        };
        const DenseCost one = cost({});
        DeviceChoice layers, ranks;
        layers.by_layers = true;
        layers.shares = {1, 2};
        ranks.ranks = 2;
        const DenseCost staged = cost(layers), ranked = cost(ranks);
        CHECK(staged.kl_mean == one.kl_mean);
        CHECK(staged.kl_max == one.kl_max);
        CHECK(staged.agreement == one.agreement);
        CHECK(ranked.kl_mean == doctest::Approx(one.kl_mean).epsilon(1e-3));
        CHECK(ranked.agreement == doctest::Approx(one.agreement).epsilon(1e-3));
    }
}

TEST_SUITE("gpus") {
    TEST_CASE("gpu split dense: two GPUs by layers have the bits of one; ranks are near") {
        for (const bool dense : {false, true})
            for (const DenseFormat format : kFormats) {
                CAPTURE(dense);
                CAPTURE(std::string(dense_format_name(format)));
                const std::string checkpoint = test::rank_model(dense).in("bf16");
                const Bits one = bits_of(checkpoint, format, {1}, make_cuda_stages({0}));
                CHECK(bits_of(checkpoint, format, {1, 1}, make_cuda_stages({0, 1})) == one);
                const Bits ranks = bits_of(checkpoint, format, {}, make_cuda_backends({0, 1}));
                const Bits cpu = bits_of(checkpoint, format, {}, test::cpu());
                const auto off = [&](const Bits& bits) {  // of the prompt, whose tokens are the same
                    const auto prompt = [](const Outcome& o) {
                        return std::vector<float>(o.logits.begin(), o.logits.begin() + 90 * 512);
                    };
                    return difference(prompt(bits.alone), prompt(cpu.alone));
                };
                CHECK(off(one) < 0.1);
                CHECK(off(ranks) < 1.5 * off(one) + 0.002);
            }
    }
}

}  // namespace
}  // namespace quern
