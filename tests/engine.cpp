// Whole = parts: a sequence's tokens do not depend on chunking, on its neighbours, or on where its state has
// been.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "engine_harness.h"
#include "ggml-like/error.h"

namespace quern {
namespace {

using test::Stepper;

struct Loaded : test::Loaded {
    explicit Loaded(const std::string& checkpoint, int threads = 2)
        : test::Loaded(test::source_dir() + "/tests/vectors/parity/" + checkpoint,
                       make_cpu_backend(threads)) {}
};

std::vector<int32_t> random_prompt(const Model& model, size_t length, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> ids(length);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % static_cast<unsigned>(model.info().vocab));
    return ids;
}

Request greedy(std::vector<int32_t> prompt, int64_t tokens) {
    Request r;
    r.prompt = std::move(prompt);
    r.sampling.temperature = 0;
    r.max_tokens = tokens;
    return r;
}

struct Trace {
    std::vector<int32_t> tokens;
    std::vector<float> logits;  // of all prompt positions
};

Trace trace(Loaded& l, const std::vector<int32_t>& prompt, int64_t step_tokens, int64_t tokens = 20) {
    Trace t;
    Engine engine(*l.model, *l.backend, {.step_tokens = step_tokens, .prompt_logits = step_tokens});
    Request r = greedy(prompt, tokens);
    r.on_prompt_logits = [&](const PromptLogits& logits) {
        t.logits.insert(t.logits.end(), logits.values.begin(), logits.values.end());
    };
    t.tokens = engine.run(std::move(r)).tokens;
    return t;
}

/// Compares bits, so that NaN and -0 count.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_SUITE("cpu") {
    TEST_CASE("prompts in steps of 64, 100, 128 and 192 rows and at once give the same bits") {
        for (const char* checkpoint : {"base/ct", "real_heads/modelopt", "deep/bf16", "dense/modelopt"}) {
            CAPTURE(checkpoint);
            Loaded l(checkpoint);
            const auto prompt = random_prompt(*l.model, 300, 7);
            const Trace whole = trace(l, prompt, 512);
            CHECK(whole.tokens.size() == 20);
            for (int64_t chunk : {64, 100, 128, 192}) {
                CAPTURE(chunk);
                const Trace parts = trace(l, prompt, chunk);
                CHECK(parts.tokens == whole.tokens);
                CHECK(same_bits(parts.logits, whole.logits));
            }
        }
    }

    TEST_CASE("on the CPU a row has the same bits in steps of any size and of either kind") {
        for (const char* checkpoint : {"base/ct", "dense/modelopt"}) {
            CAPTURE(checkpoint);
            Loaded l(checkpoint);
            const auto tokens = random_prompt(*l.model, 150, 7);
            Stepper whole(l);
            SequenceState s = whole.pool.acquire();
            const std::vector<float> expected = whole.run(s, tokens);
            for (const StepKind kind : {StepKind::prompt, StepKind::answer})
                for (const size_t rows : {1, 7, 64}) {
                    CAPTURE(rows);
                    Stepper parts(l);
                    SequenceState part = parts.pool.acquire();
                    std::vector<float> last;
                    for (size_t at = 0; at < tokens.size(); at += rows)
                        last = parts.run(
                            part, std::span(tokens).subspan(at, std::min(rows, tokens.size() - at)), kind);
                    CHECK(same_bits(last, expected));
                }
        }
    }

    TEST_CASE("the number of threads does not change a bit") {
        Loaded one("mixed/ct", 1), three("mixed/ct", 3);
        const auto prompt = random_prompt(*one.model, 70, 3);
        CHECK(same_bits(trace(one, prompt, 32).logits, trace(three, prompt, 32).logits));
    }

    TEST_CASE("a sequence among others gives what it gives alone") {
        Loaded l("base/ct");
        std::vector<std::vector<int32_t>> prompts;
        std::vector<std::vector<int32_t>> alone;
        for (unsigned i = 0; i < 8; ++i) {
            prompts.push_back(random_prompt(*l.model, 3 + 29 * i, 100 + i));
            Engine engine(*l.model, *l.backend, {});
            alone.push_back(engine.run(greedy(prompts.back(), 24)).tokens);
        }
        // Fewer places than requests, small steps, and requests that arrive while others are answering.
        Engine engine(*l.model, *l.backend, {.sequences = 3, .step_tokens = 40});
        std::vector<RequestId> ids;
        for (size_t i = 0; i < 4; ++i) ids.push_back(engine.submit(greedy(prompts[i], 24)));
        for (int i = 0; i < 9; ++i) engine.step();
        for (size_t i = 4; i < 8; ++i) ids.push_back(engine.submit(greedy(prompts[i], 24)));
        while (engine.step()) {
        }
        for (size_t i = 0; i < 8; ++i) {
            CAPTURE(i);
            REQUIRE(engine.finished(ids[i]));
            CHECK(engine.take(ids[i]).tokens == alone[i]);
        }
    }

    TEST_CASE("cancel, stop ids and limits") {
        Loaded l("base/ct");
        const auto prompt = random_prompt(*l.model, 40, 1);
        Engine engine(*l.model, *l.backend, {.context = 64, .sequences = 2});
        const std::vector<int32_t> full = engine.run(greedy(prompt, 1000)).tokens;
        CHECK(full.size() == 24);  // up to the context

        Request stop = greedy(prompt, 1000);
        stop.stop_ids = {full[5]};
        const Result stopped = engine.run(std::move(stop));
        CHECK(stopped.reason == FinishReason::stop);
        CHECK(stopped.tokens.size() <= 5);
        CHECK(std::equal(stopped.tokens.begin(), stopped.tokens.end(), full.begin()));

        const RequestId id = engine.submit(greedy(prompt, 1000));
        engine.step();
        engine.cancel(id);
        while (engine.step()) {
        }
        CHECK(engine.take(id).reason == FinishReason::cancelled);

        CHECK(engine.run(greedy(prompt, 0)).tokens.empty());
        CHECK_THROWS_AS(engine.submit(greedy(random_prompt(*l.model, 64, 1), 5)), Error);
        CHECK_THROWS_AS(engine.submit(greedy({}, 5)), Error);
        CHECK_THROWS_AS(engine.submit(greedy({static_cast<int32_t>(l.model->info().vocab_rows)}, 5)), Error);
        CHECK(engine.run(greedy(prompt, 1000)).tokens == full);  // nothing leaked from one to the next
    }

    TEST_CASE("settings that make no sense are refused, and nothing else changes") {
        Loaded l("base/ct");
        const auto prompt = random_prompt(*l.model, 20, 4);
        Engine engine(*l.model, *l.backend, {.sequences = 2});
        const std::vector<int32_t> expected = engine.run(greedy(prompt, 8)).tokens;
        Request broken = greedy(prompt, 8);
        for (int32_t id = 0; id < l.model->info().vocab; ++id)
            broken.sampling.logit_bias.emplace_back(id, 1e9f);
        CHECK_THROWS_AS(engine.submit(broken), Error);
        CHECK(engine.run(greedy(prompt, 8)).tokens == expected);
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("fork, snapshot and restore continue with the same bits") {
        Loaded l("base/ct");
        const auto head = random_prompt(*l.model, 70, 21), tail = random_prompt(*l.model, 30, 22),
                   other = random_prompt(*l.model, 30, 23);
        std::vector<int32_t> all = head;
        all.insert(all.end(), tail.begin(), tail.end());
        Stepper reference(l);
        SequenceState whole = reference.pool.acquire();
        const std::vector<float> expected = reference.run(whole, all);

        Stepper stepper(l);
        SequenceState s = stepper.pool.acquire();
        stepper.run(s, head);
        Snapshot snapshot = stepper.pool.snapshot(s);
        SequenceState fork = stepper.pool.fork(s);
        CHECK(!same_bits(stepper.run(s, other), expected));  // goes its own way, over the shared pages
        CHECK(same_bits(stepper.run(fork, tail), expected));
        stepper.pool.release(s);
        stepper.pool.release(fork);
        SequenceState restored = stepper.pool.restore(snapshot);
        CHECK(same_bits(stepper.run(restored, tail), expected));
        stepper.pool.release(restored);
        stepper.pool.release(snapshot);
        CHECK(stepper.pool.free_slots() == 3);
        CHECK(stepper.pool.free_pages() == 12);
    }

    TEST_CASE("state pool: runs out with a message, and gives everything back") {
        Loaded l("base/ct");
        Stepper stepper(l, 1);
        SequenceState s = stepper.pool.acquire();
        CHECK_THROWS_AS(stepper.pool.acquire(), Error);
        CHECK_THROWS_AS(stepper.pool.grow(s, 13 * 64), Error);
        CHECK_THROWS_AS(stepper.pool.fork(s), Error);
        stepper.pool.release(s);
        CHECK(stepper.pool.free_slots() == 1);
        CHECK(stepper.pool.free_pages() == 12);
    }
}

}  // namespace
}  // namespace quern
