// DFlash drafts against a reference in float64 (scripts/dflash_reference.py), of both kinds of published drafters, and answers
// that stay what they are without them.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <map>

#include "checkpoint_copy.h"
#include "checkpoint_writer.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/error.h"
#include "ggml-like/json.h"
#include "ggml-like/safetensors.h"
#include "models/dflash.h"
#include "tools/engine/replay_drafter.h"

namespace quern {
namespace {

namespace fs = std::filesystem;
using test::cpu, test::device, test::random_ids, test::read_json;

constexpr int64_t kDrafted = 7;
constexpr double kClose = 2e-5;

std::string vectors(const std::string& name) { return test::source_dir() + "/tests/vectors/dflash/" + name; }

template <typename T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
    const SafeTensor* t = file.find(name);
    REQUIRE_MESSAGE(t != nullptr, name);
    const auto* data = reinterpret_cast<const T*>(t->data);
    return {data, data + t->bytes() / sizeof(T)};
}

/// A drafter of tests/vectors/dflash and what it drafts for a parity checkpoint.
struct Case {
    /// `rule`: how rows of a block see each other where the config is silent.
    Case(const std::string& case_name, const std::string& parity, const std::string& rule = "causal")
        : name(case_name), checkpoint(test::parity(parity + "/bf16")), drafter(vectors(name)) {
        const SafetensorsFile file = SafetensorsFile::open(vectors(name) + ".golden.safetensors");
        ids = values<int32_t>(file, "ids");
        prompt = static_cast<size_t>(values<int32_t>(file, "prompt")[0]);
        logits = values<float>(file, "logits." + rule);
    }
    std::unique_ptr<Model> open(Backend& backend) const { return open(backend, drafter); }
    std::unique_ptr<Model> open(Backend& backend, const std::string& beside) const {
        return load_model(checkpoint, backend, {.tokenizer = false, .draft_model = beside});
    }
    std::vector<int32_t> prompt_ids() const {
        return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(prompt)};
    }
    std::vector<int32_t> answer() const {
        return {ids.begin() + static_cast<std::ptrdiff_t>(prompt), ids.end()};
    }

    std::string name, checkpoint, drafter;
    std::vector<int32_t> ids;
    size_t prompt;
    std::vector<float> logits;  // [answer tokens, kDrafted, vocabulary]
};

const std::pair<const char*, const char*> kCases[] = {
    {"new", "base"}, {"old", "base"}, {"dense", "dense"}, {"tiny", "base"}};

/// What was drafted while a request ran: by the position of the first drafted token.
struct Drafted {
    std::map<int64_t, std::vector<std::vector<float>>> rounds;
    std::vector<std::vector<float>> now = {};

    void watch(Request& r) {
        r.on_draft_logits = [this](std::span<const float> row) { now.emplace_back(row.begin(), row.end()); };
        r.on_round = [this](int64_t position, std::span<const int32_t>, int64_t) {
            rounds[position] = std::exchange(now, {});
        };
    }
};

/// The largest |ours - theirs| / |theirs| of a row of logits. Drafts near the end are shorter; a block is not.
double error(const Case& c, const Drafted& drafted) {
    double worst = 0;
    for (const auto& [position, rows] : drafted.rounds)
        for (size_t i = 0; i < rows.size(); ++i) {
            const size_t round = static_cast<size_t>(position) - c.prompt - 1;
            const float* expected = c.logits.data() + (round * kDrafted + i) * rows[i].size();
            double difference = 0, norm = 0;
            for (size_t v = 0; v < rows[i].size(); ++v) {
                difference += std::pow(double{rows[i][v]} - double{expected[v]}, 2);
                norm += std::pow(double{expected[v]}, 2);
            }
            worst = std::max(worst, std::sqrt(difference / norm));
        }
    return worst;
}

Request greedy(std::vector<int32_t> prompt, size_t tokens) {
    Request r;
    r.prompt = std::move(prompt);
    r.sampling.temperature = 0;
    r.max_tokens = static_cast<int64_t>(tokens);
    r.drafts.full = true;
    return r;
}

/// `acceptance`: of tokens that are verified in place of those that the drafter drafts; empty: none are replaced.
EngineOptions drafting(const Case& c, const std::vector<double>& acceptance = {}) {
    EngineOptions o{.context = 512,
                    .step_tokens = 64,
                    .speculation = {.kind = DrafterKind::dflash, .draft_max = kDrafted}};
    if (acceptance.empty()) return o;
    const auto replay = std::make_shared<ReplayDrafter>(acceptance, 3);
    replay->expect(c.prompt_ids(), c.answer());
    o.drafter = replay;
    return o;
}

/// A drafter's files, to be changed.
struct DrafterCopy {
    explicit DrafterCopy(const std::string& from) : config(read_json(from + "/config.json")) {
        const SafetensorsFile file = SafetensorsFile::open(from + "/model.safetensors");
        for (const SafeTensor& t : file.tensors())
            weights.add(std::string(t.name), std::string(dtype_text(t)), {t.dims().begin(), t.dims().end()},
                        {reinterpret_cast<const char*>(t.data), t.bytes()});
    }
    std::string write() const {
        dir.write("config.json", config.dump());
        dir.write("model.safetensors", weights.bytes());
        return dir.str();
    }
    test::TempDir dir;
    nlohmann::json config;
    test::SafetensorsWriter weights;
};

TEST_SUITE("cpu") {
    TEST_CASE("dflash: drafts are the reference's, whatever was accepted before, far beyond the window") {
        for (const auto& [name, parity] : kCases) {
            const auto& this_name = name;
            CAPTURE(this_name);
            const Case c(name, parity);
            const auto backend = device();
            const auto model = c.open(*backend);
            const auto falling = std::vector<double>{0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3};
            for (const auto& acceptance : {std::vector<double>{}, std::vector<double>(7, 1.0), falling}) {
                Engine engine(*model, *backend, drafting(c, acceptance));
                Drafted drafted;
                Request r = greedy(c.prompt_ids(), c.answer().size() + 1);
                drafted.watch(r);
                const Result result = engine.run(std::move(r));
                CHECK(std::vector(result.tokens.begin(), result.tokens.end() - 1) == c.answer());
                CHECK(drafted.rounds.size() >= (acceptance.empty() ? 6 : 2));
                CHECK(error(c, drafted) < kClose);
            }
        }
    }

    TEST_CASE("dflash: rows of a block see each other as the config says, also where windows are silent") {
        const Case symmetric("new", "base", "symmetric"), causal("new", "base", "causal");
        DrafterCopy copy(causal.drafter);
        copy.config["dflash_config"]["causal"] = false;
        const auto backend = cpu();
        const auto model = symmetric.open(*backend, copy.write());
        CHECK(!model->info().dflash->causality_open);
        Engine engine(*model, *backend, drafting(symmetric));
        Drafted drafted;
        Request r = greedy(symmetric.prompt_ids(), symmetric.answer().size() + 1);
        drafted.watch(r);
        engine.run(std::move(r));
        CHECK(error(symmetric, drafted) < kClose);
        CHECK(error(causal, drafted) > 1e-3);
        CHECK(causal.open(*backend)->info().dflash->causality_open);
    }

    TEST_CASE(
        "dflash: who goes on from a kept state drafts as well as who read it all, also after a restart") {
        const Case c("new", "base");
        const test::TempDir states;
        const auto going_on = [&](int32_t otherwise) {
            std::vector<int32_t> prompt = c.prompt_ids();
            for (size_t i = 128; i < prompt.size(); ++i) prompt[i] = (prompt[i] + otherwise) % 70;
            return prompt;
        };
        for (int start = 0; start < 2; ++start) {
            const auto backend = cpu();
            const auto model = c.open(*backend);
            EngineOptions options = drafting(c);
            options.cache_bytes = 64 << 20;
            options.sequences = 2;
            Engine engine(*model, *backend, options);
            CHECK(engine.load_states(states.str()) == "");
            if (start == 0) {
                Request r = greedy(going_on(1), 1);
                r.boundaries = {128};
                engine.run(std::move(r));
            }
            Drafted drafted;
            Request r = greedy(c.prompt_ids(), c.answer().size() + 1);
            drafted.watch(r);
            const RequestId id = engine.submit(std::move(r));
            while (drafted.rounds.empty()) engine.step();
            const RequestId beside = engine.submit(greedy(going_on(2), 20));
            while (engine.step()) {
            }
            CHECK(engine.take(id).cached_tokens == (start == 0 ? 128 : 192));
            CHECK(drafted.rounds.size() >= 6);
            CHECK(error(c, drafted) < kClose);
            CHECK(engine.take(beside).cached_tokens >= 128);
            CHECK(engine.save_states([] { return true; }));
        }
    }

    TEST_CASE(
        "dflash: tokens are those without drafts: greedy, drawn, alone, beside seven others, cancelled, to "
        "the end") {
        const Case c("new", "base");
        const auto backend = device();
        const auto model = c.open(*backend);
        const auto request = [&](unsigned seed) {
            Request r = greedy(random_ids(*model, 30 + 9 * seed, seed), 40);
            r.sampling = {.temperature = seed % 2 == 0 ? 0.0f : 1.0f, .seed = seed};
            r.sampling.presence_penalty = seed % 3 == 0 ? 0.5f : 0.0f;
            r.drafts.full = seed % 4 != 0;
            return r;
        };
        Engine plain(*model, *backend, {.context = 512, .step_tokens = 64});
        EngineOptions options = drafting(c);
        options.sequences = 8;
        Engine engine(*model, *backend, options);
        std::vector<std::vector<int32_t>> expected;
        int64_t drafted = 0;
        for (unsigned seed = 0; seed < 8; ++seed) {
            Request r = request(seed);
            r.drafts = {};
            expected.push_back(plain.run(std::move(r)).tokens);
            const Result alone = engine.run(request(seed));
            CHECK(alone.tokens == expected.back());
            drafted += alone.drafted;
        }
        CHECK(drafted > 100);
        std::vector<RequestId> ids;
        for (unsigned seed = 0; seed < 8; ++seed) ids.push_back(engine.submit(request(seed)));
        for (int i = 0; i < 12; ++i) engine.step();
        engine.cancel(ids[3]);
        while (engine.step()) {
        }
        for (unsigned seed = 0; seed < 8; ++seed) {
            const Result result = engine.take(ids[seed]);
            if (seed == 3)
                CHECK(std::equal(result.tokens.begin(), result.tokens.end(), expected[3].begin()));
            else
                CHECK(result.tokens == expected[seed]);
        }
        // Until the context is full: the last drafts are shorter.
        Request full = greedy(random_ids(*model, 480, 50), 100);
        full.drafts.full = false;
        const auto end = plain.run(full).tokens;
        CHECK(end.size() == 32);
        full.drafts.full = true;
        CHECK(engine.run(std::move(full)).tokens == end);
    }

    TEST_CASE("dflash: what does not fit is refused, with what was expected and found") {
        const Case c("new", "base");
        const auto backend = cpu();
        using Change = std::function<void(DrafterCopy&)>;
        const std::pair<const char*, Change> faults[] = {
            {"'target_layer_ids' should be",
             [](auto& d) {
                 d.config["dflash_config"]["target_layer_ids"] = {0, 90};
             }},
            {"'target_layer_ids' is missing",
             [](auto& d) { d.config["dflash_config"].erase("target_layer_ids"); }},
            {"'mask_token_id' should be", [](auto& d) { d.config["dflash_config"]["mask_token_id"] = 96; }},
            {"'block_size' is missing", [](auto& d) { d.config["dflash_config"].erase("block_size"); }},
            {"'vocab_size' is 95", [](auto& d) { d.config["vocab_size"] = 95; }},
            {"'hidden_size' is 64", [](auto& d) { d.config["hidden_size"] = 64; }},
            {"'num_target_layers' is 40", [](auto& d) { d.config["num_target_layers"] = 40; }},
            {"'layer_types' should be",
             [](auto& d) {
                 d.config["layer_types"] = {"linear_attention", "full_attention", "full_attention"};
             }},
            {"'sliding_window' is missing", [](auto& d) { d.config.erase("sliding_window"); }},
            {"'rope_type' should be", [](auto& d) { d.config["rope_parameters"]["rope_type"] = "longrope"; }},
            {"DSpark", [](auto& d) { d.config["markov_rank"] = 256; }},
            {"DFlash2", [](auto& d) { d.config["architectures"] = {"DFlash2DraftModel"}; }},
            {"fc.weight",
             [](auto& d) {
                 d.config["dflash_config"]["target_layer_ids"] = {0, 1};
             }},
            {"layers.1.self_attn.k_proj",
             [](auto& d) { d.weights.remove("layers.1.self_attn.k_proj.weight"); }},
            {"selector.weight",
             [](auto& d) {
                 d.weights.bf16("selector.weight", {4, 4});
             }},
            {"layers.3.", [](auto& d) { d.weights.bf16("layers.3.input_layernorm.weight", {32}); }},
        };
        for (const auto& [what, change] : faults) {
            const auto& this_what = what;
            CAPTURE(this_what);
            DrafterCopy copy(c.drafter);
            change(copy);
            CHECK_THROWS_WITH_AS(c.open(*backend, copy.write()), doctest::Contains(what), Error);
        }
        DrafterCopy cut(c.drafter);
        const std::string folder = cut.write(), bytes = cut.weights.bytes();
        cut.dir.write("model.safetensors", bytes.substr(0, bytes.size() - 100));
        CHECK_THROWS_WITH_AS(c.open(*backend, folder), doctest::Contains("model.safetensors"), Error);
        CHECK_THROWS_WITH_AS(c.open(*backend, c.checkpoint),
                             doctest::Contains("directory of a DFlash drafter"), Error);
        const auto without = c.open(*backend, "");
        CHECK_THROWS_WITH_AS(Engine(*without, *backend, drafting(c)), doctest::Contains("-md"), Error);
    }

    TEST_CASE("dflash: weights that overflow, other weights and other taps change no answer") {
        const Case c("new", "base");
        const auto backend = device();
        for (const int fault : {0, 1, 2}) {
            CAPTURE(fault);
            DrafterCopy copy(c.drafter);
            if (fault == 0)
                for (char& byte : copy.weights.at("fc.weight").data) byte = '\x7f';
            if (fault == 1)
                std::swap(copy.weights.at("layers.0.self_attn.k_proj.weight").data,
                          copy.weights.at("layers.0.self_attn.v_proj.weight").data);
            if (fault == 2) copy.config["dflash_config"]["target_layer_ids"] = {1, 2, 3};
            const auto model = c.open(*backend, copy.write());
            Engine engine(*model, *backend, drafting(c));
            CHECK(engine.run(greedy(c.prompt_ids(), c.answer().size())).tokens == c.answer());
        }
    }

    TEST_CASE("dflash: random weights in published shapes draft, where they are wanted") {
        for (const char* shape : {"tiny", "tiny-dense"}) {
            const auto backend = cpu();
            const auto run = [&](DrafterKind kind, const char* drafter) {
                const auto model =
                    open_synthetic(shape, "aeon", {.tokenizer = false, .draft_model = drafter});
                place_weights(*model, *backend);
                Engine engine(*model, *backend, {.context = 512, .speculation = {.kind = kind}});
                return engine.run(greedy(random_ids(*model, 70, 1), 12));
            };
            const Result plain = run(DrafterKind::none, ""), drafted = run(DrafterKind::dflash, "new");
            CHECK(plain.tokens == drafted.tokens);
            CHECK(drafted.drafted > 0);
        }
        CHECK_THROWS_WITH_AS(open_synthetic("tiny", "aeon", {.tokenizer = false, .draft_model = "old"}),
                             doctest::Contains("expected new"), Error);
    }

    TEST_CASE("dflash: shapes of the published drafters") {
        const DflashTarget large{.width = 2048, .layers = 40, .vocab_rows = 248320};
        const auto parameters = [](Dflash& d) {
            std::vector<WeightUse> uses;
            d.list(uses, 40);
            int64_t sum = 0;
            for (const WeightUse& use : uses) sum += use.parameters();
            // The keys' and values' matrices and the keys' norms are there twice.
            const DflashConfig& c = d.config();
            return sum - c.layers * (2 * c.kv_columns() * c.width + c.head_dim);
        };
        CHECK(parameters(*Dflash::synthetic("old", large)) == 473'995'264);
        CHECK(parameters(*Dflash::synthetic("new", large)) == 385'906'176);
        CHECK(parameters(*Dflash::synthetic("new", {.width = 5120, .layers = 64, .vocab_rows = 248320})) ==
              1'730'213'120);
    }
}

}  // namespace
}  // namespace quern
