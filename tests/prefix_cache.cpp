// Kept states: the same bits with and without a hit, at every length, and under a budget that does not
// suffice.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "checkpoint_writer.h"
#include "counted_backend.h"
#include "models/model.h"
#include "tools/engine/engine.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/prefix_cache.h"
#include "tools/engine/prompt_cuts.h"

namespace quern {
namespace {

struct Loaded {
    std::unique_ptr<Backend> backend = make_cpu_backend(2);
    std::unique_ptr<Model> model = load_model(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/ct",
                                              *backend, {.tokenizer = false, .progress = {}});
};

std::vector<int32_t> random_ids(const Model& model, size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % static_cast<unsigned>(model.info().vocab));
    return ids;
}

Request request(std::vector<int32_t> prompt, std::vector<int64_t> boundaries = {}) {
    Request r;
    r.prompt = std::move(prompt);
    r.sampling.temperature = 0.8f;
    r.sampling.seed = 5;
    r.max_tokens = 12;
    r.boundaries = std::move(boundaries);
    return r;
}

TEST_SUITE("cpu") {
    TEST_CASE("prefix cache: a follow-up computes only what is new, with the same tokens") {
        Loaded l;
        Engine cold(*l.model, *l.backend, {.context = 512});
        for (const size_t tail : {1, 2, 63, 64, 65}) {
            CAPTURE(tail);
            Engine warm(*l.model, *l.backend, {.context = 512, .cache_bytes = 64 << 20});
            const auto prompt = random_ids(*l.model, 100, 3);
            const Result first = warm.run(request(prompt, {40, 90}));
            CHECK(first.cached_tokens == 0);
            CHECK(first.tokens == cold.run(request(prompt)).tokens);

            auto next = prompt;  // goes on from the answer
            next.insert(next.end(), first.tokens.begin(), first.tokens.end());
            const auto more = random_ids(*l.model, tail, 9);
            next.insert(next.end(), more.begin(), more.end());
            const Result second = warm.run(request(next));
            CHECK(second.cached_tokens == 111);  // all but the last token of the answer, which was never run
            CHECK(second.tokens == cold.run(request(next)).tokens);

            auto branch = std::vector<int32_t>(prompt.begin(), prompt.begin() + 90);  // another last turn
            branch.insert(branch.end(), more.begin(), more.end());
            const Result third = warm.run(request(branch));
            CHECK(third.cached_tokens == 90);
            CHECK(third.tokens == cold.run(request(branch)).tokens);

            const Result again = warm.run(request(prompt));
            CHECK(again.cached_tokens ==
                  90);  // a whole prompt leaves nothing to compute: the longest before it
            CHECK(again.tokens == first.tokens);

            auto other = prompt;
            other[20] ^= 1;
            const Result miss = warm.run(request(other));
            CHECK(miss.cached_tokens == 0);
            CHECK(miss.diverged_at == 20);
        }
    }

    TEST_CASE("prefix cache: without batch invariance a prompt is cut where its beginning alone would be") {
        std::mt19937 random(4);
        for (int i = 0; i < 2000; ++i) {
            std::vector<int64_t> boundaries;
            int64_t end = 0;
            for (unsigned n = random() % 12; n > 0; --n) boundaries.push_back(end += 1 + random() % 3000);
            const int64_t longer = end + 1 + random() % 5000, shorter = 1 + random() % longer;
            const auto whole = fixed_cuts({boundaries, longer, 0, 2048});
            int64_t last = 0;
            for (const PromptCut& cut : whole) {
                CHECK(cut.at - last >= kLeastCut);
                CHECK(cut.at - last <= 2048);
                last = cut.at;
            }
            CHECK(longer - last <= 2048);
            const auto same = [](const PromptCut& a, const PromptCut& b) { return a.at == b.at; };
            const auto part = fixed_cuts({boundaries, shorter, 0, 2048});
            CHECK(std::mismatch(part.begin(), part.end(), whole.begin(), whole.end(), same).first ==
                  part.end());
            if (!part.empty()) CHECK(part.back().keep);
            for (const PromptCut& kept : part) {
                const auto rest = fixed_cuts({boundaries, longer, kept.at, 2048});
                CHECK(rest.size() == static_cast<size_t>(std::count_if(
                                         whole.begin(), whole.end(),
                                         [&](const PromptCut& cut) { return cut.at > kept.at; })));
                CHECK(std::equal(rest.rbegin(), rest.rend(), whole.rbegin(), same));
            }
        }
    }

    TEST_CASE("prefix cache: without batch invariance a hit runs the steps that a cold run ends with") {
        test::CountedBackend device(int64_t{1} << 34);
        device.invariant = false;
        const auto model = load_model(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/ct", device,
                                      {.tokenizer = false, .progress = {}});
        const EngineOptions options{.context = 4096, .step_tokens = 1024, .cache_bytes = 64 << 20};
        Engine warm(*model, device, options);
        const auto run = [&](Engine& engine, const std::vector<int32_t>& prompt,
                             const std::vector<int64_t>& boundaries, std::vector<int64_t>& ends) {
            Request r = request(prompt, boundaries);
            ends.clear();
            r.on_prefill = [&](int64_t done) { ends.push_back(done); };
            return engine.run(std::move(r));
        };
        std::vector<int32_t> prompt = random_ids(*model, 600, 1);
        std::vector<int64_t> boundaries = {600}, steps, expected;
        int64_t cached = 0;
        for (unsigned turn = 0; turn < 6; ++turn) {
            CAPTURE(turn);
            const auto user = random_ids(*model, 40 + turn * 300 % 1000, 10 + turn);
            prompt.insert(prompt.end(), user.begin(), user.end());
            boundaries.push_back(static_cast<int64_t>(prompt.size()));
            prompt.insert(prompt.end(), {1, 2, 3});  // the answer's header
            const Result result = run(warm, prompt, boundaries, steps);
            Engine cold(*model, device, options);
            CHECK(run(cold, prompt, boundaries, expected).tokens == result.tokens);
            REQUIRE(steps.size() <= expected.size());
            CHECK(std::equal(steps.rbegin(), steps.rend(), expected.rbegin()));
            CHECK(steps.front() == result.cached_tokens);
            CHECK(result.cached_tokens >= cached);
            if (turn > 0) CHECK(static_cast<int64_t>(prompt.size()) - result.cached_tokens < 1800);
            cached = result.cached_tokens;
            prompt.insert(prompt.end(), result.tokens.begin(), result.tokens.end());
            boundaries.push_back(static_cast<int64_t>(prompt.size()));
        }
        CHECK(cached > 1500);
    }

    TEST_CASE("prefix cache: without batch invariance a system prompt of any length serves other questions") {
        test::CountedBackend device(int64_t{1} << 34);
        device.invariant = false;
        const auto model = load_model(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/ct", device,
                                      {.tokenizer = false, .progress = {}});
        for (const int64_t step : {256, 1024})
            for (const int64_t system : {600, 1100, 1500, 1540, 2100}) {
                CAPTURE(step);
                CAPTURE(system);
                Engine engine(*model, device,
                              {.context = 4096, .step_tokens = step, .cache_bytes = 64 << 20});
                const auto ask = [&](unsigned seed, bool all_logits) {
                    auto prompt = random_ids(*model, static_cast<size_t>(system), 1);
                    const auto question = random_ids(*model, 700, seed);
                    prompt.insert(prompt.end(), question.begin(), question.end());
                    Request r = request(prompt, {system, system + 690});
                    if (all_logits) r.on_prompt_logits = [](const PromptLogits&) {};
                    return engine.run(std::move(r)).cached_tokens;
                };
                CHECK(ask(2, true) == 0);
                CHECK(engine.cache_stats().snapshots == 0);  // of steps that nobody else runs
                CHECK(ask(3, false) == 0);
                const int64_t kept = ask(4, false);
                CHECK(kept <= system);
                CHECK(system - kept < kLeastCut);
            }
    }

    TEST_CASE("prefix cache: a small budget is kept to, and no page or slot is lost") {
        Loaded l;
        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        const int64_t budget = 12 * slot_bytes(specs) + 30 * page_bytes(specs);
        Engine engine(*l.model, *l.backend, {.context = 256, .sequences = 2, .cache_bytes = budget});
        Engine cold(*l.model, *l.backend, {.context = 256});
        for (unsigned i = 0; i < 40; ++i) {
            const auto prompt = random_ids(*l.model, 20 + i * 5 % 180, i % 2);
            const auto half = static_cast<int64_t>(prompt.size() / 2);
            const RequestId a = engine.submit(request(prompt, {half}));
            const RequestId b = engine.submit(request(random_ids(*l.model, 50, 100 + i)));
            if (i % 3 == 0) engine.cancel(b);
            while (engine.step()) {
            }
            CHECK(engine.take(a).tokens == cold.run(request(prompt)).tokens);
            engine.take(b);
            CHECK(engine.cache_stats().bytes <= budget);
        }
        CHECK(engine.cache_stats().hits > 0);
        CHECK(engine.cache_stats().evicted > 0);
    }

    TEST_CASE("prefix cache: a device keeps states in its own memory, taken at the start, as many as fit") {
        constexpr const char* kCheckpoint = "/tests/vectors/parity/base/ct";
        constexpr int64_t kPlenty = int64_t{1} << 34;
        const EngineOptions options{.context = 256, .sequences = 2, .cache_bytes = kPlenty};
        const auto load = [&](Backend& on) {
            return load_model(std::string(QUERN_SOURCE_DIR) + kCheckpoint, on,
                              {.tokenizer = false, .progress = {}});
        };
        test::CountedBackend large(kPlenty);
        const auto planned = load(large);
        MemoryPlan plan = make_memory_plan(*planned, large, options, true);
        const int64_t each = snapshots_bytes(plan.specs, 1);
        const int64_t others = plan.needed() - plan.kept;

        test::CountedBackend device(large.used + others + 8 * each);
        const auto model = load(device);
        Engine warm(*model, device, options), cold(*planned, large, {.context = 256, .sequences = 2});
        CHECK(warm.memory_plan().kept_states == 7);  // an eighth of what is left is for others
        const int taken = device.allocations;
        for (unsigned i = 0; i < 40; ++i) {
            const auto prompt = random_ids(*model, 20 + i * 5 % 180, i % 2);
            const auto half = static_cast<int64_t>(prompt.size() / 2);
            CHECK(warm.run(request(prompt, {half})).tokens == cold.run(request(prompt)).tokens);
            CHECK(warm.cache_stats().snapshots <= 7);
        }
        CHECK(warm.cache_stats().hits > 0);
        CHECK(warm.cache_stats().evicted > 0);
        CHECK(device.allocations == taken);
    }

    TEST_CASE("prefix file: states survive the process; what is damaged, foreign or too much is not used") {
        Loaded l;
        test::TempDir directory;
        const auto prompt = random_ids(*l.model, 300, 3);
        const auto branch = [&](size_t length) {
            auto ids = std::vector<int32_t>(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(length));
            ids.push_back(7);
            return ids;
        };
        const EngineOptions options{.context = 1024, .cache_bytes = 64 << 20};
        const auto always = [] { return true; };
        const std::vector<int32_t> expected =
            Engine(*l.model, *l.backend, options).run(request(branch(200))).tokens;
        {
            Engine first(*l.model, *l.backend, options);
            CHECK(first.load_states(directory.str()).empty());
            first.run(request(prompt, {100, 200}));
            CHECK(!first.save_states([] { return false; }));
            CHECK(std::filesystem::is_empty(directory.str()));
            CHECK(first.save_states(always));
        }
        const std::string file = std::filesystem::directory_iterator(directory.str())->path().string();
        const auto restart = [&](const EngineOptions& with, std::string& remark) {
            Engine next(*l.model, *l.backend, with);
            remark = next.load_states(directory.str());
            CHECK(next.cache_stats().bytes <= with.cache_bytes);
            const Result result = next.run(request(branch(200)));
            CHECK(result.tokens == expected);
            return result.cached_tokens;
        };
        std::string remark;
        CHECK(restart(options, remark) == 200);
        CHECK(remark.empty());

        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        EngineOptions small = options;
        small.cache_bytes = slot_bytes(specs) + 6 * page_bytes(specs);  // room for one state
        restart(small, remark);
        CHECK(remark.empty());
        EngineOptions other = options;
        other.kv_type = "bf16";  // another layout has a file of its own
        CHECK(Engine(*l.model, *l.backend, other).load_states(directory.str()).empty());
        CHECK(std::filesystem::exists(file));

        std::stringstream whole;
        whole << std::ifstream(file, std::ios::binary).rdbuf();
        const std::string good = whole.str();
        const auto write = [&](const std::string& bytes) { std::ofstream(file, std::ios::binary) << bytes; };
        std::mt19937 random(1);
        for (int i = 0; i < 60; ++i) {
            std::string bad = good;
            const size_t at = i < 30 ? 8 + static_cast<size_t>(i) * 8 : random() % (good.size() - 8) + 8;
            if (i % 3 == 0)
                bad.resize(at);
            else
                bad[at] = static_cast<char>(bad[at] ^ (1 << i % 8));
            write(bad);
            restart(options, remark);
            CHECK(!remark.empty());
            CHECK(!std::filesystem::exists(file));
        }
        write("somebody's notes");
        CHECK(restart(options, remark) == 0);
        CHECK(!remark.empty());
        CHECK(std::filesystem::exists(file));
        Engine last(*l.model, *l.backend, options);
        last.load_states(directory.str());
        CHECK_THROWS_AS(last.save_states(always), Error);

        write(good);
        std::ofstream(file + ".999999999.tmp") << "half";  // of a process that died
        std::ofstream(file + ".mine") << "kept";
        restart(options, remark);
        CHECK(!std::filesystem::exists(file + ".999999999.tmp"));
        CHECK(std::filesystem::exists(file + ".mine"));
        std::filesystem::remove(file);
        last.run(request(prompt));
        CHECK(last.save_states(always));
        CHECK(std::filesystem::status(file).permissions() ==
              (std::filesystem::perms::owner_read | std::filesystem::perms::owner_write));
    }

    TEST_CASE("prefix cache: short requests do not push out a long conversation") {
        Loaded l;
        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(*l.backend, specs, 1, 64);
        const int64_t pages = page_bytes(specs), recurrent = slot_bytes(specs);
        PrefixCache cache(pool, 3 * recurrent + 40 * pages, pages, recurrent);
        const auto keep = [&](const std::vector<int32_t>& tokens) {
            SequenceState s = pool.acquire();
            pool.grow(s, static_cast<int64_t>(tokens.size()));
            s.length = static_cast<int64_t>(tokens.size());
            cache.store(tokens, s);
            pool.release(s);
        };
        const auto conversation = random_ids(*l.model, 1500, 1);
        keep(conversation);
        for (unsigned i = 0; i < 20; ++i) keep(random_ids(*l.model, 30, 2 + i));
        auto next = conversation;
        next.push_back(1);
        CHECK(cache.find(next).snapshot != nullptr);
        CHECK(cache.stats().evicted > 0);
        while (cache.evict()) {
        }
        CHECK(pool.free_pages() == 64);
        CHECK(cache.stats().bytes == 0);
    }
}

}  // namespace
}  // namespace quern
