// The MTP layer's drafts against a reference in float64 (scripts/mtp_reference.py), in every format and layout that it comes
// in; and answers that stay what they are without drafts.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "checkpoint_writer.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/error.h"
#include "ggml-like/safetensors.h"
#include "tools/engine/replay_drafter.h"

namespace quern {
namespace {

namespace fs = std::filesystem;
using test::cpu, test::device, test::random_ids;

constexpr int64_t kDrafted = 3;
constexpr double kClose = 2e-5;

std::string vectors() { return test::source_dir() + "/tests/vectors/mtp"; }

template <typename T>
std::vector<T> values(const SafetensorsFile& file, const char* name) {
    const SafeTensor* t = file.find(name);
    REQUIRE_MESSAGE(t != nullptr, name);
    const auto* data = reinterpret_cast<const T*>(t->data);
    return {data, data + t->bytes() / sizeof(T)};
}

/// A parity checkpoint and, if its name has a third part, an MTP layer beside it.
struct Case {
    explicit Case(const std::string& case_name) : name(case_name) {
        const SafetensorsFile file = SafetensorsFile::open(vectors() + "/" + name + ".golden.safetensors");
        ids = values<int32_t>(file, "ids");
        prompt = static_cast<size_t>(values<int32_t>(file, "prompt")[0]);
        drafts = values<int32_t>(file, "drafts");
        logits = values<float>(file, "logits");
        const size_t first = name.find('-'), second = name.find('-', first + 1);
        const std::string checkpoint =
            name.substr(0, first) + "/" + name.substr(first + 1, second - first - 1);
        for (const auto& entry : fs::directory_iterator(test::parity(checkpoint)))
            fs::copy(entry.path(), fs::path(dir.str()) / entry.path().filename());
        if (second != std::string::npos)
            fs::copy(vectors() + "/" + name + ".safetensors", fs::path(dir.str()) / "model_mtp.safetensors");
    }
    std::unique_ptr<Model> open(Backend& backend, MtpUse mtp = MtpUse::required) const {
        return load_model(dir.str(), backend, {.tokenizer = false, .mtp = mtp});
    }
    std::vector<int32_t> prompt_ids() const {
        return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(prompt)};
    }
    std::vector<int32_t> answer() const {
        return {ids.begin() + static_cast<std::ptrdiff_t>(prompt), ids.end()};
    }

    std::string name;
    test::TempDir dir;
    std::vector<int32_t> ids, drafts;  // drafts [answer tokens, kDrafted]
    size_t prompt;
    std::vector<float> logits;  // [answer tokens, kDrafted, vocabulary]
};

std::vector<std::string> case_names() {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(vectors())) {
        const std::string file = entry.path().filename().string();
        if (const size_t end = file.find(".golden"); end != std::string::npos)
            names.insert(file.substr(0, end));
    }
    return {names.begin(), names.end()};
}

/// What the MTP layer drafted while a request ran: by the position of the first drafted token.
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

/// The largest |ours - theirs| / |theirs| of a row of logits, of the first so many tokens of a draft.
double error(const Case& c, const Drafted& drafted, size_t tokens = kDrafted) {
    double worst = 0;
    for (const auto& [position, rows] : drafted.rounds)
        for (size_t i = 0; i < std::min(rows.size(), tokens); ++i) {
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

/// `acceptance`: of tokens that are verified in place of those that the MTP layer drafts; empty: none are replaced.
EngineOptions drafting(const Case& c, const std::vector<double>& acceptance) {
    EngineOptions o{
        .context = 512, .step_tokens = 64, .speculation = {.kind = DrafterKind::mtp, .draft_max = kDrafted}};
    if (acceptance.empty()) return o;
    const auto replay = std::make_shared<ReplayDrafter>(acceptance, 3);
    replay->expect(c.prompt_ids(), c.answer());
    o.drafter = replay;
    return o;
}

/// The same tensors, to be changed.
test::SafetensorsWriter writer(const SafetensorsFile& file) {
    test::SafetensorsWriter out;
    for (const SafeTensor& t : file.tensors())
        out.add(std::string(t.name), std::string(dtype_text(t)), {t.dims().begin(), t.dims().end()},
                {reinterpret_cast<const char*>(t.data), t.bytes()});
    return out;
}

TEST_SUITE("cpu") {
    TEST_CASE("mtp: drafts are the reference's, in every format and layout, whatever was accepted before") {
        REQUIRE(case_names().size() >= 11);
        for (const std::string& name : case_names()) {
            CAPTURE(name);
            const Case c(name);
            const auto backend = device();
            const auto model = c.open(*backend);
            for (const auto& acceptance :
                 {std::vector<double>{}, std::vector<double>{1, 1, 1}, std::vector<double>{0.8, 0.6, 0.3}}) {
                Engine engine(*model, *backend, drafting(c, acceptance));
                Drafted drafted;
                Request r = greedy(c.prompt_ids(), c.answer().size() + 1);
                drafted.watch(r);
                const Result result = engine.run(std::move(r));
                CHECK(std::vector(result.tokens.begin(), result.tokens.end() - 1) == c.answer());
                CHECK(drafted.rounds.size() >= (acceptance.empty() ? 8 : 3));
                CHECK(error(c, drafted) < kClose);
            }
        }
    }

    TEST_CASE("mtp: who goes on from a kept state drafts as well as who read it all, also after a restart") {
        const Case c("base-bf16-bf16");
        const test::TempDir states;
        const auto going_on = [&](int32_t otherwise) {
            std::vector<int32_t> prompt = c.prompt_ids();
            for (size_t i = 128; i < prompt.size(); ++i) prompt[i] = (prompt[i] + otherwise) % 80;
            return prompt;
        };
        for (int start = 0; start < 2; ++start) {
            const auto backend = cpu();
            const auto model = c.open(*backend);
            EngineOptions options = drafting(c, {});
            options.cache_bytes = 64 << 20;
            options.sequences = 2;
            Engine engine(*model, *backend, options);
            CHECK(engine.load_states(states.str()) == "");
            // All share the pages of the first 128 tokens, and go on differently.
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
            const Result result = engine.take(id);
            CHECK(result.cached_tokens == (start == 0 ? 128 : 192));
            CHECK(drafted.rounds.size() >= 8);
            CHECK(error(c, drafted) < kClose);
            CHECK(engine.take(beside).cached_tokens >= 128);
            CHECK(engine.save_states([] { return true; }));
        }
    }

    TEST_CASE("mtp: a draft after many tokens without one is the reference's") {
        const Case c("dense-bf16-nvfp4");
        const auto backend = cpu();
        const auto model = c.open(*backend);
        Engine engine(*model, *backend, drafting(c, {}));
        const std::vector<int32_t> all = c.prompt_ids();
        // The end of the prompt comes as tokens that are forced on the answer.
        const size_t begin = all.size() - 60;
        Drafted drafted;
        Request r = greedy({all.begin(), all.begin() + static_cast<std::ptrdiff_t>(begin)},
                           60 + c.answer().size() + 1);
        bool first = true;
        r.allow = [&](int32_t id) { return !first || id == all[begin]; };
        r.on_token = [&](int32_t) {
            first = false;
            return true;
        };
        size_t answered = 0;
        r.force = [&] {
            return ++answered == 1
                       ? std::vector<int32_t>(all.begin() + static_cast<std::ptrdiff_t>(begin) + 1, all.end())
                       : std::vector<int32_t>();
        };
        size_t next = begin;
        r.allow = [&](int32_t id) { return next >= all.size() || id == all[next]; };
        r.on_token = [&](int32_t) { return ++next > 0; };
        drafted.watch(r);
        const Result result = engine.run(std::move(r));
        CAPTURE(result.error);
        REQUIRE(result.tokens.size() == 60 + c.answer().size() + 1);
        CHECK(std::vector(result.tokens.begin() + 60, result.tokens.end() - 1) == c.answer());
        std::erase_if(drafted.rounds,
                      [&](const auto& round) { return round.first <= static_cast<int64_t>(all.size()); });
        CHECK(drafted.rounds.size() >= 8);
        CHECK(error(c, drafted) < 1e-3);  // answers round otherwise than prompts
    }

    TEST_CASE("mtp: a layer that cannot be read fails no load unless it was asked for, and is named") {
        const Case c("base-bf16-bf16");
        const std::string path = c.dir / "model_mtp.safetensors";
        const test::SafetensorsWriter whole =
            writer(SafetensorsFile::open(vectors() + "/" + c.name + ".safetensors"));
        using Change = std::function<void(test::SafetensorsWriter&)>;
        const std::string layer = "mtp.layers.0.";
        const std::pair<const char*, Change> faults[] = {
            {"no MTP layer", [](auto& w) { w.remove("mtp.fc.weight"); }},
            {"k_proj", [&](auto& w) { w.remove(layer + "self_attn.k_proj.weight"); }},
            {"mtp.fc.weight",
             [](auto& w) {
                 w.at("mtp.fc.weight").shape = {64, 32};
             }},
            {"experts.7", [&](auto& w) { w.remove(layer + "mlp.experts.7.down_proj.weight"); }},
            {"pre_fc_norm_hidden",
             [](auto& w) {
                 w.at("mtp.pre_fc_norm_hidden.weight").data[1] = '\x7f',
                 w.at("mtp.pre_fc_norm_hidden.weight").data[0] = '\xff';
             }},
            {"second layer", [](auto& w) { w.bf16("mtp.layers.1.input_layernorm.weight", {32}); }},
            {"embeddings of its own",
             [](auto& w) {
                 w.bf16("mtp.embed_tokens.weight", {96, 32});
             }},
        };
        const auto backend = cpu();
        for (const auto& [what, change] : faults) {
            const auto& this_what = what;
            CAPTURE(this_what);
            test::SafetensorsWriter damaged = whole;
            change(damaged);
            c.dir.write("model_mtp.safetensors", damaged.bytes());
            CHECK_THROWS_WITH_AS(c.open(*backend), doctest::Contains(what), Error);
            const auto model = c.open(*backend, MtpUse::if_readable);
            CHECK(!model->info().mtp);
            const auto& notes = model->notes();
            CHECK(std::any_of(notes.begin(), notes.end(), [&](const std::string& note) {
                return note.starts_with("no drafts by MTP: ") && note.find(this_what) != std::string::npos;
            }));
            CHECK(Engine(*model, *backend, {.context = 512, .speculation = {.kind = DrafterKind::automatic}})
                      .run(greedy(c.prompt_ids(), c.answer().size()))
                      .tokens == c.answer());
        }
        c.dir.write("model_mtp.safetensors", whole.bytes());
        CHECK(c.open(*backend, MtpUse::if_readable)->info().mtp);
        const auto without = c.open(*backend, MtpUse::none);
        CHECK(!without->info().mtp);
        CHECK_THROWS_WITH_AS(Engine(*without, *backend, drafting(c, {})),
                             doctest::Contains("without its MTP layer"), Error);
    }

    TEST_CASE("mtp: weights that overflow, and tensors in one another's place, change no answer") {
        const Case c("base-bf16-bf16");
        const SafetensorsFile file = SafetensorsFile::open(vectors() + "/" + c.name + ".safetensors");
        const std::string attention = "mtp.layers.0.self_attn.", norms = "mtp.pre_fc_norm_";
        const std::pair<std::string, std::string> swaps[] = {
            {"", ""},
            {attention + "k_proj.weight", attention + "v_proj.weight"},
            {norms + "embedding.weight", norms + "hidden.weight"}};
        for (const auto& [one, other] : swaps) {
            const auto& this_one = one;
            CAPTURE(this_one);
            test::SafetensorsWriter changed = writer(file);
            if (one.empty())
                for (size_t i = 1; i < changed.at("mtp.fc.weight").data.size(); i += 2)
                    changed.at("mtp.fc.weight").data[i] = '\x7f',
                    changed.at("mtp.fc.weight").data[i - 1] = '\x7f';
            else
                std::swap(changed.at(one).data, changed.at(other).data);
            c.dir.write("model_mtp.safetensors", changed.bytes());
            const auto backend = device();
            const auto model = c.open(*backend);
            Engine engine(*model, *backend, drafting(c, {}));
            CHECK(engine.run(greedy(c.prompt_ids(), c.answer().size())).tokens == c.answer());
        }
    }

    TEST_CASE("mtp: where a device cannot run it, auto goes on without, and says so") {
        const Case c("base-bf16-bf16");
        auto owned = std::make_unique<test::CountedBackend>(int64_t{1} << 34);
        test::CountedBackend& backend = *owned;
        const auto model = c.open(backend);
        EngineOptions options = drafting(c, {});
        backend.before_run = [] { throw Error(ErrorKind::device, "kernels do not support this"); };
        try {
            const Engine engine(*model, backend, options);
            FAIL("expected an error");
        } catch (const Error& error) {
            CHECK(error.kind() == ErrorKind::device);
        }
        options.speculation.kind = DrafterKind::automatic;
        Engine engine(*model, backend, options);
        backend.before_run = nullptr;
        REQUIRE(engine.notes().size() == 1);
        CHECK(engine.notes()[0] == "no drafts by MTP: kernels do not support this");
        CHECK(engine.run(greedy(c.prompt_ids(), c.answer().size())).tokens == c.answer());
    }

    TEST_CASE("mtp: where a device drafts for few sequences at a time, several passes draft for all") {
        const Case c("base-bf16-bf16");
        auto owned = std::make_unique<test::CountedBackend>(int64_t{1} << 34);
        test::CountedBackend& backend = *owned;
        const auto model = c.open(backend);
        EngineOptions options = drafting(c, {});
        options.sequences = 5;
        // A prompt's pass, one draft, two: three are too many.
        backend.before_run = [runs = 0]() mutable {
            if (++runs == 4) throw Error(ErrorKind::device, "too little shared memory");
        };
        Engine engine(*model, backend, options);
        backend.before_run = nullptr;
        std::vector<Drafted> drafted(5);
        std::vector<RequestId> ids;
        for (Drafted& d : drafted) {
            Request r = greedy(c.prompt_ids(), c.answer().size() + 1);
            d.watch(r);
            ids.push_back(engine.submit(std::move(r)));
        }
        while (engine.step()) {
        }
        for (size_t i = 0; i < ids.size(); ++i) {
            CHECK(engine.take(ids[i]).tokens.size() == c.answer().size() + 1);
            CHECK(drafted[i].rounds.size() >= 8);
            CHECK(error(c, drafted[i]) < kClose);
        }
    }

    TEST_CASE(
        "mtp: matrices in 16 bits beside NVFP4 layers become NVFP4, where drafters get smaller copies") {
        int changed = 0;
        for (const std::string& name : case_names()) {
            CAPTURE(name);
            const Case c(name);
            const auto backend = device();
            const auto model =
                load_model(c.dir.str(), *backend,
                           {.tokenizer = false, .mtp = MtpUse::required, .draft_format = DenseFormat::fp8});
            const ModelWeights& weights = model->weights();
            if (std::none_of(weights.copies.begin(), weights.copies.end(),
                             [](const WeightCopy& copy) { return copy.of != nullptr; }))
                continue;
            ++changed;
            for (const WeightUse& use : weights.uses) {
                CHECK(use.copy == use.mtp_product);
                if (use.copy && use.matrix != nullptr) {
                    CHECK(use.matrix->name.find("router") == std::string::npos);
                    CHECK(use.matrix->segments.front().dtype == DType::NVFP4);
                }
                if (use.experts == nullptr) continue;
                for (const Weight& expert : use.experts->expert)
                    for (const WeightSegment& s : expert.segments) CHECK(s.dtype == DType::NVFP4);
            }
            Engine engine(*model, *backend, drafting(c, {}));
            Drafted drafted;
            Request r = greedy(c.prompt_ids(), c.answer().size() + 1);
            drafted.watch(r);
            const Result result = engine.run(std::move(r));
            CHECK(std::vector(result.tokens.begin(), result.tokens.end() - 1) == c.answer());
            CHECK(error(c, drafted, 1) > kClose);
            CHECK(error(c, drafted, 1) < 0.4);  // a second token follows what was drafted first
        }
        CHECK(changed >= 1);
    }

    TEST_CASE("mtp: which matrices of random weights become NVFP4") {
        const auto copied = [](const char* shape, const char* mix) {
            const auto model = open_synthetic(
                shape, mix, {.tokenizer = false, .mtp = MtpUse::required, .draft_format = DenseFormat::fp8});
            std::set<std::string> names;
            for (const WeightUse& use : model->weights().uses) {
                if (!use.copy || use.matrix == nullptr) continue;
                names.insert(use.matrix->name);
                CHECK(use.matrix->segments.front().dtype == DType::NVFP4);
            }
            return names;
        };
        using Names = std::set<std::string>;
        CHECK(copied("tiny-dense", "aeon") ==
              Names{"mtp.fc", "mtp.attn.in_proj", "mtp.attn.out_proj", "mtp.mlp.gate_up", "mtp.mlp.down"});
        CHECK(copied("tiny", "aeon") == Names{"mtp.fc", "mtp.attn.in_proj", "mtp.attn.out_proj",
                                              "mtp.moe.shared_gate_up", "mtp.moe.shared_down"});
        CHECK(copied("tiny", "qwen-fp8").empty());
    }

    TEST_CASE("mtp: random weights in the shapes of real ones have the layer, where it is wanted") {
        for (const char* shape : {"tiny", "tiny-dense"})
            for (const char* mix : {"aeon", "qwen-fp8"}) {
                const auto backend = cpu();
                const auto run = [&](DrafterKind kind, MtpUse use) {
                    const auto model = open_synthetic(shape, mix, {.tokenizer = false, .mtp = use});
                    place_weights(*model, *backend);
                    CHECK(model->info().mtp == (use == MtpUse::required));
                    Engine engine(*model, *backend, {.context = 512, .speculation = {.kind = kind}});
                    return engine.run(greedy(random_ids(*model, 70, 1), 12));
                };
                const Result plain = run(DrafterKind::none, MtpUse::none),
                             drafted = run(DrafterKind::mtp, MtpUse::required);
                CHECK(plain.tokens == drafted.tokens);
                CHECK(drafted.drafted > 0);
            }
    }
}

}  // namespace
}  // namespace quern
