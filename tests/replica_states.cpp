// Engines that share their states in host memory: each goes on from what the others have left, with the bits of a cold run.
#include <doctest/doctest.h>

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "cached_requests.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "tools/engine/engine.h"
#include "tools/engine/kept_states.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/prefix_cache.h"
#include "tools/engine/state_pool.h"

namespace quern {
namespace {

using test::longer;
using test::random_ids;
using test::request;

const std::string kCheckpoint = test::parity("base/ct");

/// Engines of one model on devices of their own.
struct Engines {
    explicit Engines(size_t count, int64_t cache_bytes = int64_t{64} << 20, bool devices = true) {
        for (size_t i = 0; i < count; ++i) {
            loaded.push_back(
                std::make_unique<test::Loaded>(kCheckpoint, devices ? test::device() : test::cpu()));
            EngineOptions options{.context = 1024, .sequences = 4, .cache_bytes = cache_bytes};
            if (i > 0) options.kept = engines[0]->kept_states();
            options.sharing = static_cast<int64_t>(count);
            engines.push_back(std::make_unique<Engine>(*loaded[i]->model, *loaded[i]->backend, options));
        }
    }
    ~Engines() { engines.clear(); }
    Engine& operator[](size_t i) { return *engines[i]; }
    const Model& model() const { return *loaded[0]->model; }
    test::CountedBackend& device(size_t i) {
        return dynamic_cast<test::CountedBackend&>(*loaded[i]->backend);
    }

    std::vector<std::unique_ptr<test::Loaded>> loaded;
    std::vector<std::unique_ptr<Engine>> engines;
};

std::vector<int32_t> cold(const std::vector<int32_t>& prompt, int64_t tokens = 6) {
    test::Loaded l(kCheckpoint, test::device());
    Engine engine(*l.model, *l.backend, {.context = 1024});
    return engine.run(request(prompt, tokens)).tokens;
}

TEST_SUITE("model") {
    TEST_CASE("replica states: a follow-up goes on from what another engine has left") {
        for (const bool devices : {false, true}) {
            CAPTURE(devices);
            Engines e(3, int64_t{64} << 20, devices);
            const auto first = random_ids(e.model(), 330, 1);
            CHECK(e[0].run(request(first)).cached_tokens == 0);
            e[0].settle_states();
            const auto second = longer(first, 150), third = longer(first, 400);
            const Result b = e[1].run(request(second));
            CHECK(b.cached_tokens == 320);
            CHECK(b.tokens == cold(second));
            e[1].settle_states();
            const Result c =
                e[2].run(request(third));  // from the second's, which shares pages with the first's
            CHECK(c.cached_tokens == round_down_to_page(480));
            CHECK(c.tokens == cold(third));
            e[2].settle_states();
            const Result a = e[0].run(request(longer(third, 9)));
            CHECK(a.cached_tokens == round_down_to_page(730));
            CHECK(a.tokens == cold(longer(third, 9)));
            CHECK(e[1].cache_stats().snapshots == e[0].cache_stats().snapshots);
        }
    }

    TEST_CASE("replica states: a copy that runs is its engine's alone until it has ended") {
        Engines e(2);
        e.device(0).saving = true;
        const auto prompt = random_ids(e.model(), 300, 2), next = longer(prompt, 10);
        const RequestId id = e[0].submit(request(prompt, 1));
        while (!e[0].finished(id)) e[0].step();
        e[0].take(id);
        const auto kept = e[0].kept_states();
        CHECK(kept->beginning(next).anywhere == 0);
        CHECK(kept->beginning(next).near == std::vector<int64_t>{256, 0});
        CHECK(e[1].run(request(next)).cached_tokens == 0);
        CHECK(e[0].run(request(next)).cached_tokens == 256);
        e[0].settle_states();
        e[1].settle_states();
        CHECK(kept->beginning(next).anywhere == 256);
        CHECK(kept->beginning(next).near == std::vector<int64_t>{256, 0});
        CHECK(e[1].run(request(longer(next, 1))).cached_tokens == 256);
        CHECK(kept->beginning(next).near == std::vector<int64_t>{256, 256});
    }

    TEST_CASE("replica states: what a failed device was still copying is given up, the rest stays") {
        Engines e(2);
        const auto kept = random_ids(e.model(), 300, 3), lost = random_ids(e.model(), 300, 4);
        e[0].run(request(kept));
        e[0].settle_states();
        e.device(0).saving = true;
        const RequestId id = e[0].submit(request(lost, 1));
        while (!e[0].finished(id)) e[0].step();
        CHECK(e[0].cache_stats().snapshots == 2);
        e[0].abandon_states();
        CHECK(e[1].cache_stats().snapshots == 1);
        CHECK(e[1].run(request(longer(kept, 5))).cached_tokens == 256);
        CHECK(e[1].run(request(longer(lost, 5))).cached_tokens == 0);
        CHECK(e[1].kept_states()->beginning(longer(kept, 5)).near == std::vector<int64_t>{0, 256});
    }

    TEST_CASE("replica states: engines evict each other's states, and use the memory anew") {
        Engines e(2, int64_t{3} << 20);
        std::vector<std::vector<int32_t>> prompts;
        for (unsigned i = 0; i < 12; ++i) prompts.push_back(random_ids(e.model(), 300 + 40 * i, 20 + i));
        for (size_t i = 0; i < prompts.size(); ++i) {
            e[i % 2].run(request(prompts[i]));
            e[i % 2].settle_states();
        }
        CHECK(e[0].cache_stats().evicted > 0);
        CHECK(e[0].cache_stats().bytes <= e[0].cache_stats().budget);
        int64_t found = 0;
        for (size_t i = 0; i < prompts.size(); ++i) {
            const auto next = longer(prompts[i], 30);
            const Result r = e[(i + 1) % 2].run(request(next));
            found += r.cached_tokens > 0;
            CHECK(r.tokens == cold(next));
        }
        CHECK(found > 0);
    }

    TEST_CASE(
        "replica states: what another one gives up between the search and the start is not gone on from") {
        test::Loaded a(kCheckpoint, test::cpu()), b(kCheckpoint, test::cpu());
        const auto specs = a.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool of_a(*a.backend, specs, 1, 64), of_b(*b.backend, specs, 1, 64);
        PrefixCache first(*a.backend, of_a, int64_t{64} << 20);
        PrefixCache second(*b.backend, of_b, 0, first.shared());
        const auto tokens = random_ids(*a.model, 128, 1), next = longer(tokens, 1);
        SequenceState s = of_a.acquire_for(128);
        first.store(tokens, s);
        of_a.release(s);
        CHECK(second.find(next).entry == nullptr);  // the copy may still run
        CHECK_FALSE(second.evict());
        first.settle(true);
        const PrefixCache::Match found = second.find(next);
        REQUIRE(found.entry != nullptr);
        CHECK(first.stats().near == 1);
        CHECK(of_a.free_pages() == 62);
        CHECK(second.evict());  // the copy on the first one's device is the first one's to release
        CHECK(of_a.free_pages() == 62);
        CHECK(second.resume(found).slot < 0);
        CHECK(of_b.free_pages() == 64);
        CHECK_FALSE(first.evict_near());
        CHECK(of_a.free_pages() == 64);
        CHECK(first.stats().near == 0);
        CHECK(second.stats().bytes == 0);
        CHECK(second.stats().evicted == 1);
    }

    TEST_CASE("replica states: engines on threads of their own") {
        Engines e(2, int64_t{4} << 20);
        std::vector<std::vector<int32_t>> prompts, expected;
        for (unsigned i = 0; i < 10; ++i) {
            prompts.push_back(random_ids(e.model(), 280 + 20 * i, 40 + i));
            expected.push_back(cold(longer(prompts[i], 30)));
        }
        std::atomic<int> wrong = 0;
        std::atomic<int64_t> cached = 0;
        const auto drive = [&](size_t engine) {
            for (size_t round = 0; round < 3; ++round)
                for (size_t i = 0; i < prompts.size(); ++i) {
                    const size_t at = (i + 5 * engine) % prompts.size();
                    e[engine].run(request(prompts[at]));
                    const Result r = e[engine].run(request(longer(prompts[at], 30)));
                    wrong += r.tokens != expected[at];
                    cached += r.cached_tokens;
                    if (i % 3 == 0) e[engine].settle_states();
                }
        };
        std::thread other(drive, 1);
        drive(0);
        other.join();
        CHECK(wrong == 0);
        CHECK(cached > 0);
    }

    TEST_CASE("replica states: they are saved by any engine, and taken back by the first for all") {
        namespace fs = std::filesystem;
        const fs::path directory =
            fs::temp_directory_path() / ("quern-replicas-" + std::to_string(::getpid()));
        std::vector<int32_t> prompt;
        {
            Engines e(2);
            prompt = random_ids(e.model(), 300, 5);
            e[0].load_states(directory.string());
            e[1].name_directory(directory.string());
            e[0].run(request(prompt));
            e[0].settle_states();
            CHECK(e[1].save_states([] { return true; }));
        }
        {
            Engines e(2);
            CHECK(e[0].load_states(directory.string()).empty());
            const auto next = longer(prompt, 10);
            const Result r = e[1].run(request(next));
            CHECK(r.cached_tokens == 256);
            CHECK(r.tokens == cold(next));
        }
        fs::remove_all(directory);
    }
}

}  // namespace
}  // namespace quern
