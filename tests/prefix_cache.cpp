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
#include "engine_harness.h"
#include "models/weight_placement.h"
#include "tools/engine/engine.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/prefix_cache.h"
#include "tools/engine/prefix_file.h"
#include "tools/engine/prompt_cuts.h"

namespace quern {
namespace {

using test::random_ids;

struct Loaded : test::Loaded {
    Loaded() : test::Loaded(test::parity("base/ct"), test::cpu()) {}
};

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
    TEST_CASE("prefix cache: a follow-up reads at most 63 tokens of the prompt again, with the same tokens") {
        Loaded l;
        Engine cold(*l.model, *l.backend, {.context = 1024});
        for (const size_t tail : {1, 2, 63, 64, 65}) {
            CAPTURE(tail);
            Engine warm(*l.model, *l.backend, {.context = 1024, .cache_bytes = 64 << 20});
            const auto prompt = random_ids(*l.model, 400, 3);
            const Result first = warm.run(request(prompt, {80, 330}));
            CHECK(first.cached_tokens == 0);
            CHECK(first.tokens == cold.run(request(prompt)).tokens);
            CHECK(warm.cache_stats().snapshots == 3);  // at 64, 320 and 384

            auto next = prompt;  // goes on from the answer
            next.insert(next.end(), first.tokens.begin(), first.tokens.end());
            const auto more = random_ids(*l.model, tail, 9);
            next.insert(next.end(), more.begin(), more.end());
            const Result second = warm.run(request(next));
            CHECK(second.cached_tokens == 384);
            CHECK(second.tokens == cold.run(request(next)).tokens);

            auto branch = std::vector<int32_t>(prompt.begin(), prompt.begin() + 330);  // another last turn
            branch.insert(branch.end(), more.begin(), more.end());
            const Result third = warm.run(request(branch));
            CHECK(third.cached_tokens == 320);
            CHECK(third.tokens == cold.run(request(branch)).tokens);

            const auto exact = std::vector<int32_t>(prompt.begin(), prompt.begin() + 384);
            const Result fourth = warm.run(request(exact));
            CHECK(fourth.cached_tokens == 320);  // the whole prompt would leave nothing to compute
            CHECK(fourth.tokens == cold.run(request(exact)).tokens);

            auto other = prompt;
            other[20] ^= 1;
            const Result miss = warm.run(request(other));
            CHECK(miss.cached_tokens == 0);
            CHECK(miss.diverged_at == 20);
        }
    }

    TEST_CASE(
        "prompt cuts: rising multiples of 64 beyond what is kept; the end is less than 64 tokens away") {
        std::mt19937 random(4);
        for (int i = 0; i < 2000; ++i) {
            std::vector<int64_t> boundaries;
            int64_t end = 0;
            for (unsigned n = random() % 12; n > 0; --n) boundaries.push_back(end += 1 + random() % 3000);
            const int64_t tokens = end + 1 + random() % 5000, done = round_down_to_page(random() % tokens);
            const auto cuts = cuts_to_keep({boundaries, tokens, done});
            int64_t last = done;
            for (const int64_t cut : cuts) {
                CHECK(cut > last);
                CHECK(at_page_end(cut));
                last = cut;
            }
            CHECK(tokens - last < 64);
            const auto kept = [&](int64_t at) {
                at = round_down_to_page(at);
                return at <= done || std::find(cuts.begin(), cuts.end(), at) != cuts.end();
            };
            if (!boundaries.empty()) CHECK((kept(boundaries.front()) && kept(boundaries.back())));
        }
        using Cuts = std::deque<int64_t>;
        const std::vector<int64_t> ends = {100, 1000, 2300, 2400, 2500, 9000};
        CHECK(cuts_to_keep({ends, 9010}) == Cuts{64, 2240, 8960});
        CHECK(cuts_to_keep({ends, 9070, 2240}) == Cuts{8960, 9024});
        CHECK(cuts_to_keep({ends, 9010, 0, 256}) == Cuts{2240, 8960});
        CHECK(cuts_to_keep({{}, 255, 0, 256}) == Cuts{});
        CHECK(cuts_to_keep({{}, 319, 0, 256}) == Cuts{256});
        CHECK(cuts_to_keep({{}, 319, 192, 256}) == Cuts{256});  // beyond a kept one, however few
        CHECK(cuts_to_keep({{}, 63}) == Cuts{});
    }

    TEST_CASE("prefix cache: turn by turn the last state is at most 63 tokens before the last prompt's end") {
        for (const bool device : {false, true}) {
            test::CountedBackend counted(int64_t{1} << 34);
            const auto cpu = make_cpu_backend(2);
            Backend& backend = device ? static_cast<Backend&>(counted) : *cpu;
            const auto model = load_model(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/ct",
                                          backend, {.tokenizer = false});
            const EngineOptions options{.context = 4096, .sequences = 2, .cache_bytes = 64 << 20};
            Engine warm(*model, backend, options);
            Engine cold(*model, backend, {.context = 4096});
            auto prompt = random_ids(*model, 300, 1);
            std::vector<int64_t> boundaries;
            int64_t before = 0;
            for (unsigned turn = 0; turn < 12; ++turn) {
                CAPTURE(turn);
                const auto user = random_ids(*model, 5 + turn * 37 % 150, 10 + turn);
                prompt.insert(prompt.end(), user.begin(), user.end());
                boundaries.push_back(static_cast<int64_t>(prompt.size()));
                prompt.insert(prompt.end(), {1, 2, 3});  // the answer's header
                std::vector<int64_t> steps;
                Request r = request(prompt, boundaries);
                r.on_prefill = [&](int64_t done) { steps.push_back(done); };
                const RequestId id = warm.submit(std::move(r));
                const RequestId beside = warm.submit(request(random_ids(*model, 70 + 50 * turn, turn)));
                while (warm.step()) {
                }
                warm.take(beside);
                const Result result = warm.take(id);
                CHECK(steps.front() == result.cached_tokens);
                CHECK(steps.back() == static_cast<int64_t>(prompt.size()));
                CHECK(result.cached_tokens == round_down_to_page(before));
                CHECK(result.tokens == cold.run(request(prompt)).tokens);
                before = static_cast<int64_t>(prompt.size());
                prompt.insert(prompt.end(), result.tokens.begin(), result.tokens.end());
            }
        }
    }

    TEST_CASE("prefix cache: requests for all logits use no state and leave theirs") {
        Loaded l;
        Engine engine(*l.model, *l.backend, {.context = 1024, .cache_bytes = 64 << 20});
        const auto prompt = random_ids(*l.model, 500, 3);
        for (int i = 0; i < 2; ++i) {
            int64_t rows = 0;
            Request r = request(prompt);
            r.on_prompt_logits = [&](const PromptLogits& logits) {
                CHECK(logits.first == rows);
                rows += static_cast<int64_t>(logits.count());
            };
            CHECK(engine.run(std::move(r)).cached_tokens == 0);
            CHECK(rows == 500);
        }
        CHECK(engine.cache_stats().snapshots == 1);
        const Result next = engine.run(request(prompt));
        CHECK(next.cached_tokens == 448);
        CHECK(next.tokens == Engine(*l.model, *l.backend, {.context = 1024}).run(request(prompt)).tokens);
    }

    TEST_CASE("prefix cache: a device keeps no state of a short first prompt, which would cost it a step") {
        test::CountedBackend device(int64_t{1} << 34);
        const auto model = load_model(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/base/ct", device,
                                      {.tokenizer = false});
        Engine engine(*model, device, {.context = 1024, .cache_bytes = 64 << 20});
        engine.run(request(random_ids(*model, 255, 1), {100, 250}));
        CHECK(engine.cache_stats().snapshots == 0);
        engine.run(request(random_ids(*model, 256, 2), {100, 250}));
        CHECK(engine.cache_stats().snapshots == 1);
    }

    TEST_CASE("prefix cache: a small budget is kept to, and no page or slot is lost") {
        Loaded l;
        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        const int64_t budget = 2 * slot_bytes(specs) + 6 * page_bytes(specs);
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

    TEST_CASE(
        "prefix cache: a device also keeps states in its own memory, taken at the start, as many as fit") {
        constexpr const char* kCheckpoint = "/tests/vectors/parity/base/ct";
        constexpr int64_t kPlenty = int64_t{1} << 34;
        const EngineOptions options{.context = 1024, .sequences = 2, .cache_bytes = kPlenty};
        const auto load = [&](Backend& on) {
            return load_model(std::string(QUERN_SOURCE_DIR) + kCheckpoint, on, {.tokenizer = false});
        };
        test::CountedBackend large(kPlenty);
        const auto planned = load(large);
        MemoryPlan plan = make_memory_plan(*planned, large, options, true);
        const int64_t each = snapshots_bytes(plan.specs, 1);
        const int64_t others = plan.needed() - plan.kept;

        test::CountedBackend device(large.used + others + 8 * each);
        const auto model = load(device);
        Engine warm(*model, device, options), cold(*planned, large, {.context = 1024, .sequences = 2});
        CHECK(warm.memory_plan().kept_states == 7);  // an eighth of what is left is for others
        const int taken = device.allocations;
        for (unsigned i = 0; i < 40; ++i) {
            const auto prompt = random_ids(*model, 280 + i * 15 % 600, i % 2);
            const auto half = static_cast<int64_t>(prompt.size() / 2);
            CHECK(warm.run(request(prompt, {half})).tokens == cold.run(request(prompt)).tokens);
            CHECK(warm.cache_stats().near <= 7);
        }
        CHECK(warm.cache_stats().near == 7);
        CHECK(warm.cache_stats().snapshots > 7);
        CHECK(warm.cache_stats().evicted == 0);
        const int64_t before = warm.cache_stats().loaded;  // the newest is there still, the oldest is not
        warm.run(request(random_ids(*model, 866, 1)));
        CHECK(warm.cache_stats().loaded == before);
        auto oldest = random_ids(*model, 256, 0);
        oldest.resize(300, 3);
        CHECK(warm.run(request(oldest)).tokens == cold.run(request(oldest)).tokens);
        CHECK(warm.cache_stats().loaded == before + 1);
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
        CHECK(restart(options, remark) == 192);
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
        for (const size_t left : {size_t{0}, size_t{1}, size_t{7}}) {  // as a full disk may leave it
            write(good.substr(0, left));
            CHECK(restart(options, remark) == 0);
            CHECK(!std::filesystem::exists(file));
        }
        std::string earlier = good;  // states of an earlier format, at any length
        earlier[7] = '1';
        write(earlier);
        CHECK(restart(options, remark) == 0);
        CHECK(remark.find("of another model or version") != std::string::npos);
        CHECK(!std::filesystem::exists(file));
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

    TEST_CASE("prefix file: states that were left in a crowd give the same answers after a restart") {
        Loaded l;
        test::TempDir directory;
        const EngineOptions options{
            .context = 1024, .sequences = 4, .step_tokens = 192, .cache_bytes = 64 << 20};
        std::vector<std::vector<int32_t>> prompts;
        for (unsigned i = 0; i < 8; ++i) prompts.push_back(random_ids(*l.model, 130 + 60 * i, i));
        {
            Engine crowd(*l.model, *l.backend, options);
            crowd.load_states(directory.str());
            std::vector<RequestId> ids;
            for (const auto& prompt : prompts) ids.push_back(crowd.submit(request(prompt)));
            while (crowd.step()) {
            }
            CHECK(crowd.save_states([] { return true; }));
        }
        EngineOptions later = options;  // steps of other sizes
        later.step_tokens = 512;
        Engine next(*l.model, *l.backend, later), cold(*l.model, *l.backend, {.context = 1024});
        CHECK(next.load_states(directory.str()).empty());
        for (auto prompt : prompts) {
            const int64_t kept = round_down_to_page(static_cast<int64_t>(prompt.size()));
            prompt.insert(prompt.end(), {5, 6, 7});
            const Result result = next.run(request(prompt));
            CHECK(result.cached_tokens == kept);
            CHECK(result.tokens == cold.run(request(prompt)).tokens);
        }
    }

    TEST_CASE("prefix cache: short requests do not push out a long conversation") {
        Loaded l;
        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(*l.backend, specs, 1, 64, 0);
        const int64_t page = page_bytes(specs), blocks = (slot_bytes(specs) + page - 1) / page;
        PrefixCache cache(*l.backend, pool, (3 * blocks + 40) * page);
        const auto keep = [&](const std::vector<int32_t>& tokens) {
            SequenceState s = pool.acquire_for(static_cast<int64_t>(tokens.size()));
            cache.store(tokens, s);
            pool.release(s);
        };
        const auto conversation = random_ids(*l.model, 1472, 1);
        keep(conversation);
        for (unsigned i = 0; i < 20; ++i) keep(random_ids(*l.model, 64, 2 + i));
        auto next = conversation;
        next.push_back(1);
        CHECK(cache.find(next).entry != nullptr);
        CHECK(cache.stats().evicted > 0);
        while (cache.evict()) {
        }
        CHECK(pool.free_pages() == 64);
        CHECK(cache.stats().bytes == 0);
    }

    TEST_CASE("prefix cache: where states are already, a directory need not be written to at the start") {
        const test::Loaded l(test::parity("base/ct"), test::cpu());
        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(*l.backend, specs, 1, 8, 0);
        PrefixCache cache(*l.backend, pool, 1 << 20);
        const test::TempDir dir;
        std::filesystem::create_directory(dir /
                                          "quern-states-0000000000000007");  // which nobody can write to
        const PrefixFile file(dir.str(), 7);
        CHECK(file.load(cache).find("is no file of quern's: it is left alone") != std::string::npos);
    }
}

}  // namespace
}  // namespace quern
