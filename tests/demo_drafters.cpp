// The demo's own drafters, trained by scripts/train_demo.py: how much of its answers they foresee, and that the answers stay
// what they are. What the start says of drafters that do not fit.
#include <doctest/doctest.h>

#include <filesystem>

#include "checkpoint_copy.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/json.h"
#include "lazy_backend.h"
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

/// Drafts that stay on the device, made ahead or not, are as right as those that somebody looks at.
void check_late_drafts(Backend& backend, size_t n) {
    for (const DrafterKind kind : {DrafterKind::mtp, DrafterKind::dflash}) {
        const auto model = open(backend, kind);
        Engine engine(*model, backend, drafting(kind, kind == DrafterKind::mtp ? 3 : 7));
        for (const bool ahead : {false, true}) {
            CAPTURE(ahead);
            const auto run = [&](Request r, bool watched) {
                r.max_tokens = 800;
                // The highest logit in another way, after which nothing is drafted ahead.
                if (!ahead) r.allow = [](int32_t) { return true; };
                if (watched) r.on_round = [](int64_t, std::span<const int32_t>, int64_t) {};
                return engine.run(std::move(r));
            };
            for (const Request& r : requests(*model, n)) {
                const Result seen = run(r, true), late = run(r, false);
                REQUIRE(late.reason == FinishReason::stop);
                CHECK(late.tokens == seen.tokens);
                CHECK(late.drafted == seen.drafted);
                CHECK(late.accepted == seen.accepted);
                CHECK(late.accepted > 0);
            }
            const SpeculationReport report = *engine.speculation();
            CHECK((report.ahead > 0) == (ahead && backend.asynchronous()));
            CHECK(report.passes[static_cast<size_t>(DraftRows::all)] >= report.rounds);
        }
    }
}

/// What happens while a draft is made ahead changes no token: the answer or the context ends, a callback stops it or adds tokens,
/// others come and go, lengths of drafts change, what was read before is kept.
void check_surprises(Backend& backend, DrafterKind kind) {
    const auto plain_model = open(backend, DrafterKind::none);
    Engine plain(*plain_model, backend, drafting(DrafterKind::none, 7, 3));
    const auto model = open(backend, kind);
    EngineOptions options = drafting(kind, kind == DrafterKind::mtp ? 3 : 7, 3);
    options.cache_bytes = 64 << 20;
    Engine engine(*model, backend, options);
    const auto same = [&](const std::function<void(Request&)>& change) {
        Request a = requests(*model, 70).front(), b = a;
        change(a), change(b);
        CHECK(engine.run(std::move(a)).tokens == plain.run(std::move(b)).tokens);
    };
    for (int64_t tokens = 1; tokens < 30; tokens += 3)
        same([&](Request& r) {
            r.max_tokens = tokens;
            r.drafts.full = tokens % 2 == 0;
            r.use_cache = tokens > 10;
        });
    for (const size_t stop : {1, 7, 8, 9})
        same([&](Request& r) { r.on_token = [n = size_t{0}, stop](int32_t) mutable { return ++n < stop; }; });
    for (const size_t at : {3, 4, 5, 6})
        same([&](Request& r) {
            auto told = std::make_shared<size_t>(0);
            r.max_tokens = 40;
            r.on_token = [told](int32_t) { return ++*told > 0; };
            r.force = [told, at] {
                return *told == at ? std::vector<int32_t>{300, 301} : std::vector<int32_t>();
            };
        });
    std::vector<Request> others = requests(*model, 60);
    std::vector<RequestId> ids;
    for (size_t i = 0; i < others.size(); ++i) {
        others[i].max_tokens = 20 + 9 * static_cast<int64_t>(i);
        others[i].drafts.full = i % 2 == 0;
        ids.push_back(engine.submit(others[i]));
        for (size_t n = 0; n < 3 + i; ++n) engine.step();
    }
    while (engine.step()) {
    }
    for (size_t i = 0; i < others.size(); ++i)
        CHECK(engine.take(ids[i]).tokens == plain.run(others[i]).tokens);
    CHECK(engine.speculation()->ahead > 0);
}

TEST_SUITE("cpu") {
    TEST_CASE("demo's drafters: drafts that stay on the device are as right" * doctest::test_suite("slow")) {
        check_late_drafts(*cpu(), 50);
        test::LazyBackend late;  // what is queued is done as late as it may be
        check_late_drafts(late, 100);
        for (const DrafterKind kind : {DrafterKind::mtp, DrafterKind::dflash}) check_surprises(late, kind);
    }

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
    TEST_CASE("gpu model: the demo's drafts that stay on the device are as right") {
        const auto backend = test::make_test_cuda_backend();
        check_late_drafts(*backend, 15);
        for (const DrafterKind kind : {DrafterKind::mtp, DrafterKind::dflash})
            check_surprises(*backend, kind);
    }
}

}  // namespace
}  // namespace quern
