// The demo's own drafters, trained by scripts/train_demo.py: how much of its answers they foresee, and that the answers stay
// what they are. What the start says of drafters that do not fit.
#include <doctest/doctest.h>

#include <filesystem>

#include "checkpoint_copy.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/json.h"
#include "models/chat_format.h"
#include "models/tokenizer.h"
#include "ops/second_backend.h"
#include "tools/bench/quality.h"

namespace quern {
namespace {

namespace fs = std::filesystem;
using test::cpu;

const std::string kDemo = test::source_dir() + "/models/demo", kDrafter = kDemo + "/dflash";

std::unique_ptr<Model> open(Backend& backend, DrafterKind kind, const std::string& drafter = kDrafter,
                            DenseFormat format = DenseFormat::as_stored) {
    const bool mtp = kind == DrafterKind::mtp;
    OpenOptions options{.mtp = mtp ? MtpUse::required : MtpUse::none, .draft_format = format};
    if (kind == DrafterKind::dflash) options.draft_model = drafter;
    return load_model(kDemo, backend, options);
}

/// Every n-th question of eval.jsonl.
std::vector<Request> requests(const Model& model, size_t n) {
    const auto questions = read_questions(kDemo + "/eval.jsonl");
    std::vector<Request> list;
    for (size_t i = 0; i < questions.size(); i += n) {
        const Question& q = questions[i];
        Request r;
        r.prompt = encode_prompt(model.chat().render(q.messages, q.tools, {.thinking = q.thinking}),
                                 *model.tokenizer());
        r.sampling.temperature = 0;
        r.max_tokens = 120;
        r.stop_ids = model.generation().eos_ids;
        r.drafts.full = true;
        list.push_back(std::move(r));
    }
    return list;
}

struct Measured {
    int64_t rounds = 0, drafted = 0, accepted = 0;
    double foreseen() const { return static_cast<double>(accepted) / static_cast<double>(drafted); }
    double a_round() const { return static_cast<double>(accepted) / static_cast<double>(rounds); }
};

Measured measured(Engine& engine, size_t n) {
    Measured m;
    for (Request& r : requests(engine.model(), n)) {
        r.on_round = [&](int64_t, std::span<const int32_t> drafted, int64_t accepted) {
            ++m.rounds;
            m.drafted += static_cast<int64_t>(drafted.size());
            m.accepted += accepted;
        };
        engine.run(std::move(r));
    }
    return m;
}

EngineOptions drafting(DrafterKind kind, int64_t most, int64_t sequences = 1) {
    return {.context = 1024, .sequences = sequences, .speculation = {.kind = kind, .draft_max = most}};
}

/// A drafter with another configuration.
std::string changed_drafter(const test::TempDir& dir, const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json config = test::read_json(kDrafter + "/config.json");
    change(config);
    dir.write("config.json", config.dump());
    fs::copy(kDrafter + "/model.safetensors", fs::path(dir.str()) / "model.safetensors");
    return dir.str();
}

/// Answers to every n-th question, greedy and drawn in turns, `sequences` at the same time.
std::vector<std::vector<int32_t>> answers(Backend& backend, DrafterKind kind, int64_t most, int64_t sequences,
                                          size_t n) {
    const auto model = open(backend, kind, kDrafter, DenseFormat::fp8);
    Engine engine(*model, backend, drafting(kind, most, sequences));
    CHECK(engine.notes().empty());
    std::vector<RequestId> ids;
    std::vector<std::vector<int32_t>> results;
    for (Request& r : requests(*model, n)) {
        r.sampling.seed = ids.size();
        r.sampling.temperature = ids.size() % 2 == 0 ? 0.0f : 1.0f;
        r.max_tokens = 60;
        ids.push_back(engine.submit(std::move(r)));
    }
    while (engine.step()) {
    }
    for (const RequestId id : ids) results.push_back(engine.take(id).tokens);
    return results;
}

void check_same_answers(Backend& backend, size_t n) {
    const auto plain = answers(backend, DrafterKind::none, 7, 8, n);
    for (const DrafterKind kind : {DrafterKind::mtp, DrafterKind::dflash})
        for (const int64_t sequences : {1, 8})
            CHECK(answers(backend, kind, kind == DrafterKind::mtp ? 3 : 7, sequences, n) == plain);
}

TEST_SUITE("cpu") {
    TEST_CASE("demo's drafters: how much they foresee" * doctest::test_suite("slow")) {
        const auto backend = cpu();
        {
            const auto model = open(*backend, DrafterKind::mtp);
            Engine engine(*model, *backend, drafting(DrafterKind::mtp, 1));
            CHECK(engine.notes().empty());
            const Measured m = measured(engine, 8);
            MESSAGE("MTP, n = 1: " << m.foreseen() << " of " << m.drafted << " tokens");
            CHECK(m.foreseen() >= 0.70);
        }
        for (const DenseFormat format : {DenseFormat::as_stored, DenseFormat::fp8}) {
            const auto model = open(*backend, DrafterKind::dflash, kDrafter, format);
            Engine engine(*model, *backend, drafting(DrafterKind::dflash, 7));
            CHECK(engine.notes().empty());
            const Measured m = measured(engine, 8);
            MESSAGE("DFlash " << dense_format_name(format) << ", n = 7: " << m.a_round()
                              << " tokens in each of " << m.rounds << " rounds");
            CHECK(m.a_round() >= 3.0);
        }
    }

    TEST_CASE("demo's drafters: answers are the same, greedy and drawn, alone and eight together" *
              doctest::test_suite("slow")) {
        check_same_answers(*cpu(), 13);
    }

    TEST_CASE("start: a drafter with wrong taps is named and switched off, a silent config is found out") {
        const auto backend = cpu();
        const test::TempDir wrong, silent;
        const std::string taps = changed_drafter(wrong, [](auto& c) {
            c["dflash_config"]["target_layer_ids"] = {7, 0, 2};
        });
        const auto other = open(*backend, DrafterKind::dflash, taps);
        Engine off(*other, *backend, drafting(DrafterKind::dflash, 7));
        REQUIRE(off.notes().size() == 1);
        CHECK(off.notes()[0].starts_with("no drafts by dflash: "));
        CHECK(off.notes()[0].find("7, 0, 2") != std::string::npos);
        Request r = requests(*other, 400).front();
        CHECK(off.run(std::move(r)).drafted == 0);

        const std::string open_config =
            changed_drafter(silent, [](auto& c) { c["dflash_config"].erase("causal"); });
        const auto model = open(*backend, DrafterKind::dflash, open_config);
        CHECK(model->info().dflash->causality_open);
        Engine engine(*model, *backend, drafting(DrafterKind::dflash, 7));
        REQUIRE(engine.notes().size() == 1);
        CHECK(engine.notes()[0].find("taken as not causal") != std::string::npos);
        CHECK(measured(engine, 60).a_round() >= 2.0);
    }
}

TEST_SUITE("cuda") {
    TEST_CASE("gpu model: answers are the same with the demo's drafters, alone and eight together") {
        check_same_answers(*test::make_test_cuda_backend(), 5);
    }
}

}  // namespace
}  // namespace quern
