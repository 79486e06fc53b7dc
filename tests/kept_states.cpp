// States in host memory: more conversations than contexts, the bits of a cold run, what is given up first, and what is said of it.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <random>
#include <thread>

#include "cached_requests.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "lazy_backend.h"
#include "models/weight_placement.h"
#include "tools/engine/engine.h"
#include "tools/engine/host_memory.h"
#include "tools/engine/host_states.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/prefix_cache.h"

namespace quern {
namespace {

using test::longer;
using test::random_ids;
using test::request;

const std::string kCheckpoint = test::parity("base/ct");

/// A cache of its own, without an engine: states are as long as they are said to be, and hold what was there.
struct Cache {
    Cache(int64_t states, int64_t pages)
        : l(kCheckpoint, test::cpu()),
          specs(l.model->state_specs({.kv = DType::F32, .conv = DType::F32})),
          pool(*l.backend, specs, 1, 256, 0),
          cache(*l.backend, pool,
                (states * HostStates(*l.backend, pool, 0).recurrent_blocks() + pages) * page_bytes(specs)) {}

    void keep(const std::vector<int32_t>& tokens, uint64_t conversation = 0) {
        SequenceState s = pool.acquire_for(static_cast<int64_t>(tokens.size()));
        cache.store(tokens, s, conversation);
        pool.release(s);
    }
    /// Goes on from the longest state, as a request does; how many tokens it had.
    int64_t follow(const std::vector<int32_t>& prompt) {
        const PrefixCache::Match match = cache.find(prompt);
        if (match.entry == nullptr) return 0;
        SequenceState s = cache.resume(match);
        const int64_t length = s.length;
        pool.release(s);
        return length;
    }

    test::Loaded l;
    std::vector<StateSpec> specs;
    StatePool pool;
    PrefixCache cache;
};

constexpr int64_t kLength = 4 * kPageTokens;

/// All memory of a sequence of kLength tokens: its recurrent parts, then its pages.
std::vector<StatePool::Part> parts_of(const StatePool& pool, const SequenceState& s) {
    std::vector<StatePool::Part> parts = pool.recurrent_parts(s.slot);
    for (const int32_t page : s.pages)
        for (const StatePool::Part& part : pool.page_parts())
            parts.push_back({part.data + page * part.bytes, part.bytes});
    return parts;
}

std::vector<std::byte> read_all(Backend& backend, const StatePool& pool, const SequenceState& s) {
    std::vector<std::byte> bytes;
    for (const StatePool::Part& part : parts_of(pool, s)) {
        bytes.resize(bytes.size() + static_cast<size_t>(part.bytes));
        backend.download(bytes.data() + bytes.size() - part.bytes, part.data, part.bytes);
    }
    return bytes;
}

/// A sequence of kLength tokens whose state is random bytes.
struct Painted {
    Painted(Backend& backend, StatePool& pool, unsigned seed) : state(pool.acquire_for(kLength)) {
        std::mt19937 random(seed);
        for (const StatePool::Part& part : parts_of(pool, state)) {
            std::vector<std::byte> own(static_cast<size_t>(part.bytes));
            for (std::byte& byte : own) byte = static_cast<std::byte>(random());
            backend.upload(part.data, own.data(), part.bytes);
            backend.synchronize();
            bytes.insert(bytes.end(), own.begin(), own.end());
        }
    }
    SequenceState state;
    std::vector<std::byte> bytes;
};

TEST_SUITE("cpu") {
    TEST_CASE("kept states: 60 conversations beside 4 contexts, every follow-up goes on from its own" *
              doctest::test_suite("slow")) {
        for (const bool device : {false, true}) {
            CAPTURE(device);
            test::Loaded l(kCheckpoint, device ? test::device() : test::cpu());
            const auto cold_backend = test::cpu();
            const auto cold_model = load_model(kCheckpoint, *cold_backend, {.tokenizer = false});
            Engine cold(*cold_model, *cold_backend, {.context = 1024});
            // Four contexts have 64 pages together; the conversations need 840.
            Engine warm(*l.model, *l.backend, {.context = 1024, .sequences = 4, .cache_bytes = 256 << 20});
            std::map<unsigned, RequestId> ids;
            for (unsigned i = 0; i < 60; ++i) ids[i] = warm.submit(request(random_ids(*l.model, 923, i)));
            while (warm.step()) {
            }
            for (const auto& [i, id] : ids) CHECK(warm.take(id).cached_tokens == 0);
            for (unsigned i = 0; i < 60; ++i)
                ids[i] = warm.submit(request(longer(random_ids(*l.model, 923, i), 40)));
            while (warm.step()) {
            }
            int cached = 0, same = 0;
            for (const auto& [i, id] : ids) {
                const Result result = warm.take(id);
                cached += result.cached_tokens == 896;
                if (i % 6 == 0)
                    same +=
                        result.tokens == cold.run(request(longer(random_ids(*l.model, 923, i), 40))).tokens;
            }
            CHECK(cached == 60);
            CHECK(same == 10);
            const PrefixCacheStats stats = warm.cache_stats();
            CHECK(stats.evicted == 0);
            CHECK(stats.loaded > 0);
            CHECK(stats.bytes <= 256 << 20);
        }
    }

    TEST_CASE("kept states: a block is another state's when no device copies to or from it any more") {
        for (const int stages : {1, 2, 3}) {
            CAPTURE(stages);
            const test::LazyStages lazy(stages);
            const auto model = load_model(test::parity("deep/bf16"), *lazy.group, {.tokenizer = false});
            const MemoryPlan plan = make_memory_plan(*model, *lazy.group, {.context = 512}, true);
            StatePool pool(*lazy.group, plan.specs, 8, 64);
            HostStates states(*lazy.group, pool, 16 << 20);
            REQUIRE(states.make_free(4 * states.most_blocks(kLength)));
            const Painted a(*lazy.group, pool, 1), b(*lazy.group, pool, 2), c(*lazy.group, pool, 3);
            // A gap before the first, so that the second has pages where the first has recurrent state
            std::vector<int32_t> gap = states.take(1);
            HostStates::State kept = states.save(a.state);
            states.drop(gap);
            states.release(kept);
            kept = states.save(b.state);
            states.finish();
            const SequenceState loaded = states.load(kept);
            CHECK(read_all(*lazy.group, pool, loaded) == b.bytes);

            const SequenceState loading = states.load(kept);
            gap = states.take(1);  // behind it
            states.release(kept);
            states.drop(gap);
            gap = states.take(1);
            kept = states.save(c.state);
            states.finish();
            CHECK(read_all(*lazy.group, pool, loading) == b.bytes);
            CHECK(read_all(*lazy.group, pool, states.load(kept)) == c.bytes);
        }
    }

    TEST_CASE("kept states: what a conversation adds is copied, not all of it again") {
        Cache c(40, 200);
        auto tokens = random_ids(*c.l.model, 64 * 20, 1);
        c.keep(tokens);
        const int64_t recurrent = c.cache.memory().recurrent_blocks() * c.cache.memory().block_bytes();
        CHECK(c.cache.stats().bytes == recurrent + 20 * page_bytes(c.specs));
        // The next turn goes on from the state, so its pages are copies of those in host memory.
        const auto next = longer(tokens, 128);
        SequenceState s = c.cache.resume(c.cache.find(next));
        c.pool.grow(s, 64 * 22);
        s.length = 64 * 22;
        c.cache.store(next, s);
        c.pool.release(s);
        CHECK(c.cache.stats().bytes == 2 * recurrent + 22 * page_bytes(c.specs));
    }

    TEST_CASE("kept states: titles and summaries never push out the conversation that they are about") {
        Cache c(3, 60);
        auto talk = random_ids(*c.l.model, 64 * 40, 1);
        c.keep(talk);
        for (unsigned turn = 0; turn < 12; ++turn) {
            CAPTURE(turn);
            // Of a first turn, too: another opening, then the conversation's own words.
            auto title = random_ids(*c.l.model, 64, 100 + turn);
            title.insert(title.end(), talk.begin(), talk.end());
            CHECK(c.follow(title) == 0);
            c.keep(title);
            const auto next = longer(talk, 64);
            CHECK(c.follow(next) >= 64 * 40);
            c.keep(next);
            talk = next;
        }
        // Somebody who comes again and again with something else gets a place in the end.
        const auto other = random_ids(*c.l.model, 64 * 40, 77);
        int tries = 0;
        while (c.follow(longer(other, 1)) == 0 && ++tries < 40) c.keep(other);
        CHECK(tries > 1);
        CHECK(tries < 40);
    }

    TEST_CASE("kept states: in a named conversation what goes on from nothing is worth least") {
        for (const uint64_t name : {uint64_t{0}, uint64_t{9}}) {
            Cache c(3, 60);
            const auto talk = random_ids(*c.l.model, 64 * 10, 1),
                       summary = random_ids(*c.l.model, 64 * 25, 2);
            c.keep(talk, name);
            c.keep(summary, name);
            c.keep(random_ids(*c.l.model, 64 * 30, 3));  // has no room beside both
            CHECK((c.follow(longer(talk, 1)) > 0) == (name != 0));
        }
    }

    TEST_CASE("kept states: the report says what is where, and why something was dropped") {
        Cache c(2, 30);
        c.keep(random_ids(*c.l.model, 64 * 20, 1));
        CHECK(c.follow(longer(random_ids(*c.l.model, 64 * 20, 1), 5)) == 64 * 20);
        c.keep(random_ids(*c.l.model, 64 * 40, 2));
        c.keep(random_ids(*c.l.model, 64 * 15, 3));
        KeptReport r = c.cache.report();
        REQUIRE(r.kept.size() == 1);
        CHECK(r.kept[0].tokens == 64 * 20);
        CHECK(r.kept[0].uses == 1);
        CHECK(std::string(r.kept[0].where) == "host memory");
        CHECK(r.kept[0].bytes == c.cache.stats().bytes);
        REQUIRE(r.dropped.size() == 2);
        CHECK(r.dropped[0].tokens == 64 * 15);
        CHECK(std::string(r.dropped[0].why).find("worth more") != std::string::npos);
        CHECK(r.dropped[1].tokens == 64 * 40);
        CHECK(std::string(r.dropped[1].why).find("larger than --cache-ram") != std::string::npos);
        for (int i = 0; i < 9; ++i) c.keep(random_ids(*c.l.model, 64 * 15, 3));
        r = c.cache.report();
        CHECK(r.kept[0].tokens == 64 * 15);
        CHECK(std::string(r.dropped[0].why).find("worth least") != std::string::npos);

        test::Loaded l(kCheckpoint, test::device());
        Engine engine(*l.model, *l.backend, {.context = 1024, .cache_bytes = 64 << 20});
        engine.run(request(random_ids(*l.model, 300, 1)));
        CHECK(std::string(engine.kept_report().kept.at(0).where) == "device and host memory");
    }

    TEST_CASE("kept states: from scattered pages and blocks comes back what was there, in two calls") {
        test::CountedBackend device(int64_t{1} << 34);
        const auto model = load_model(kCheckpoint, device, {.tokenizer = false});
        const auto specs = model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(device, specs, 2, 128, 0);
        HostStates memory(device, pool, int64_t{1} << 30);
        const auto parts = static_cast<int64_t>(pool.page_parts().size());
        const int64_t count = 24;
        const auto pages_of = [&](const SequenceState& s) {
            std::vector<std::byte> bytes;
            for (const int32_t page : s.pages)
                for (const StatePool::Part& p : pool.page_parts())
                    bytes.insert(bytes.end(), p.data + page * p.bytes, p.data + (page + 1) * p.bytes);
            for (const StatePool::Part& p : pool.recurrent_parts(s.slot))
                bytes.insert(bytes.end(), p.data, p.data + p.bytes);
            return bytes;
        };
        const auto fill = [&](const SequenceState& s) {
            std::mt19937 draw(7);
            const auto write = [&](std::byte* to, int64_t bytes) {
                for (int64_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(draw());
            };
            for (const int32_t page : s.pages)
                for (const StatePool::Part& p : pool.page_parts()) write(p.data + page * p.bytes, p.bytes);
            for (const StatePool::Part& p : pool.recurrent_parts(s.slot)) write(p.data, p.bytes);
        };
        for (const bool scattered : {false, true}) {
            CAPTURE(scattered);
            REQUIRE(memory.make_free(2 * (count + memory.recurrent_blocks()) + 100));
            // Every second page, and every second block, are somebody else's.
            std::vector<int32_t> others;
            SequenceState s = pool.acquire_for(kPageTokens * count * 2), other = s;
            other.pages.clear();
            if (scattered) {
                std::vector<int32_t> blocks = memory.take(100), even;
                for (size_t i = 0; i < blocks.size(); ++i) (i % 2 == 0 ? even : others).push_back(blocks[i]);
                memory.drop(even);
                std::vector<int32_t> own;
                for (size_t i = 0; i < s.pages.size(); ++i)
                    (i % 2 == 0 ? own : other.pages).push_back(s.pages[i]);
                s.pages = own;
            } else {
                s.pages.resize(static_cast<size_t>(count));
            }
            s.length = kPageTokens * count;
            fill(s);
            const std::vector<std::byte> bytes = pages_of(s);
            HostStates::State kept = memory.save(s);
            memory.finish();
            pool.release(s);
            device.loads = device.loaded = 0;
            SequenceState again = memory.load(kept);
            CHECK(pages_of(again) == bytes);
            CHECK(device.loads == 2);
            const auto recurrent = static_cast<int64_t>(pool.recurrent_parts(again.slot).size());
            const int64_t stretches = parts * memory.recurrent_blocks();
            CHECK(device.loaded <= (scattered ? count * parts : 2 * parts) + recurrent + stretches);
            if (scattered) CHECK(device.loaded >= count * parts);
            pool.release(again);
            memory.release(kept);
            memory.drop(others);
        }
    }

    TEST_CASE("kept states: memory ahead is taken when nobody waits for a first token") {
        test::CountedBackend device(int64_t{1} << 34);
        const auto model = load_model(kCheckpoint, device, {.tokenizer = false});
        const auto specs = model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(device, specs, 1, 64, 0);
        PrefixCache cache(device, pool, int64_t{10} << 30);
        // The first piece of memory is nearly all used, so that another one is wanted.
        cache.find(random_ids(*model, 64, 1));
        std::vector<int32_t> used;
        REQUIRE(cache.memory().make_free(1));
        const int first = device.host_pieces;
        const int64_t slab = (int64_t{128} << 20) / cache.memory().block_bytes();
        used = cache.memory().take(slab - 100);
        SequenceState s = pool.acquire_for(kPageTokens * 2);
        cache.store(random_ids(*model, kPageTokens * 2, 2), s);
        CHECK(device.host_pieces == first);
        cache.keep_ahead();
        REQUIRE(cache.memory().make_free(slab));  // waits for it
        CHECK(device.host_pieces == first + 1);
        cache.keep_ahead();  // nothing was kept since
        REQUIRE(cache.memory().make_free(slab));
        CHECK(device.host_pieces == first + 1);
        cache.memory().drop(used);
        pool.release(s);
    }

    TEST_CASE("kept states: memory for the first ones is taken before any request, if asked for") {
        for (const int64_t budget : {int64_t{10} << 30, int64_t{0}}) {
            CAPTURE(budget);
            test::CountedBackend device(int64_t{1} << 34);
            const auto model = load_model(kCheckpoint, device, {.tokenizer = false});
            Engine engine(*model, device, {.context = 256, .cache_bytes = budget});
            const int before = device.host_pieces;
            engine.expect_states(1 << 19);  // more than 128 MB
            const int wanted = budget > 0 ? before + 2 : before;
            for (int i = 0; i < 1000 && device.host_pieces < wanted; ++i)
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
            CHECK(device.host_pieces >= wanted);
            if (budget == 0) CHECK(device.host_pieces == before);
        }
    }

    TEST_CASE("kept states: as much memory is taken ahead as a state has needed last, and a piece more") {
        test::CountedBackend device(int64_t{1} << 34);
        const auto model = load_model(kCheckpoint, device, {.tokenizer = false});
        const auto specs = model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(device, specs, 1, 64, 0);
        HostStates memory(device, pool, int64_t{10} << 30);
        const int64_t slab = (int64_t{128} << 20) / memory.block_bytes();
        REQUIRE(memory.make_free(3 * slab));
        CHECK(device.host_pieces == 3);
        std::vector<int32_t> used = memory.take(2 * slab + 1);
        memory.keep_ahead();
        for (int i = 0; i < 1000 && device.host_pieces < 7; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(device.host_pieces == 7);
        REQUIRE(memory.make_free(3 * slab));
        CHECK(device.host_pieces == 7);
        memory.drop(used);
        memory.keep_ahead();  // there is enough
        REQUIRE(memory.make_free(1));
        CHECK(device.host_pieces == 7);
    }

    TEST_CASE("kept states: a small state waits for one piece of memory, not for all that is taken ahead") {
        test::CountedBackend device(int64_t{1} << 34);
        const auto model = load_model(kCheckpoint, device, {.tokenizer = false});
        const auto specs = model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(device, specs, 1, 64, 0);
        std::promise<void> go_on;
        device.before_host_memory = [&, all = go_on.get_future().share()] {
            if (device.host_pieces == 4)
                all.wait();  // three were needed at first, and one is there of those ahead
        };
        {
            HostStates memory(device, pool, int64_t{10} << 30);
            const int64_t slab = (int64_t{128} << 20) / memory.block_bytes();
            REQUIRE(memory.make_free(3 * slab));
            std::vector<int32_t> used = memory.take(3 * slab);
            memory.keep_ahead();
            CHECK(memory.make_free(1));
            used.push_back(memory.take(1).front());
            go_on.set_value();
            CHECK(memory.make_free(3 * slab));
            memory.drop(used);
        }
        CHECK(device.host_pieces >= 7);
    }

    TEST_CASE("kept states: where the machine has no more memory, what there is stays the budget") {
        test::CountedBackend device(int64_t{1} << 34);
        const auto model = load_model(kCheckpoint, device, {.tokenizer = false});
        const auto specs = model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(device, specs, 1, 64, 0);
        device.host_left = int64_t{300} << 20;
        HostStates memory(device, pool, int64_t{10} << 30);
        int64_t blocks = 1;
        while (memory.make_free(blocks)) blocks *= 2;
        CHECK(memory.budget() > int64_t{200} << 20);
        CHECK(memory.budget() <= int64_t{300} << 20);
        CHECK(memory.make_free(memory.budget() / memory.block_bytes()));
        CHECK(host_memory_left() > 0);
    }
}

}  // namespace
}  // namespace quern
