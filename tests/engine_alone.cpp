// An answer depends on its request alone: not on who runs beside it, on the rows of a step, on kept states,
// or on those beside it that fail.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "checkpoint_copy.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/error.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/step_inputs.h"

namespace quern {
namespace {

using test::cpu, test::device, test::parity, test::random_ids;

/// Tokens of an answer and the logits that each was chosen from, as they left the model.
struct Answer {
    std::vector<int32_t> tokens;
    std::vector<float> logits;

    /// Compares bits, so that NaN and -0 count.
    bool operator==(const Answer& o) const {
        return tokens == o.tokens && logits.size() == o.logits.size() &&
               std::memcmp(logits.data(), o.logits.data(), logits.size() * sizeof(float)) == 0;
    }
};

/// A request, greedy or drawn, that writes its logits to `to`.
Request recorded(std::vector<int32_t> prompt, unsigned number, Answer& to) {
    Request r;
    r.sampling.temperature = number % 2 == 0 ? 0.0f : 1.0f;
    r.sampling.seed = number;
    r.max_tokens = 10 + number % 7;
    r.boundaries = {static_cast<int64_t>(prompt.size() / 2)};
    r.prompt = std::move(prompt);
    r.on_logits = [&to](int32_t, std::span<const float> row) {
        to.logits.insert(to.logits.end(), row.begin(), row.end());
    };
    return r;
}

/// Prompts of 1 to 500 tokens; those that share a number of three begin alike.
std::vector<std::vector<int32_t>> prompts(const Model& model) {
    std::vector<std::vector<int32_t>> list;
    for (unsigned i = 0; i < 12; ++i) {
        auto ids = random_ids(model, 1 + i * 45, i % 3);
        ids.back() = static_cast<int32_t>(i);
        list.push_back(std::move(ids));
    }
    return list;
}

/// All together, in an order of their own, some of them later.
std::vector<Answer> together(Engine& engine, const std::vector<std::vector<int32_t>>& prompts,
                             unsigned order) {
    std::vector<Answer> answers(prompts.size());
    std::vector<RequestId> ids(prompts.size());
    std::vector<size_t> turn(prompts.size());
    for (size_t i = 0; i < turn.size(); ++i) turn[i] = i;
    std::shuffle(turn.begin(), turn.end(), std::mt19937(order));
    for (const size_t i : turn) {
        ids[i] = engine.submit(recorded(prompts[i], static_cast<unsigned>(i), answers[i]));
        for (unsigned steps = order % 4; steps > 0; --steps) engine.step();
    }
    while (engine.step()) {
    }
    for (size_t i = 0; i < ids.size(); ++i) {
        Result result = engine.take(ids[i]);
        CHECK(result.reason == FinishReason::length);
        answers[i].tokens = std::move(result.tokens);
    }
    return answers;
}

std::vector<Answer> alone(test::Loaded& l, const std::vector<std::vector<int32_t>>& prompts) {
    std::vector<Answer> answers(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i)
        answers[i].tokens = Engine(*l.model, *l.backend, {.context = 1024})
                                .run(recorded(prompts[i], static_cast<unsigned>(i), answers[i]))
                                .tokens;
    return answers;
}

constexpr int32_t kPoison = 3;

/// A checkpoint whose token kPoison has an embedding of NaN. Only who asks for it meets it.
class PoisonedModel {
  public:
    PoisonedModel(const char* checkpoint, std::unique_ptr<Backend> backend)
        : copy_(checkpoint), loaded_(poisoned(copy_), std::move(backend)) {}

    /// 150 tokens and an answer of 14, both without kPoison.
    Request request(unsigned number) const {
        Request r;
        r.prompt = random_ids(*loaded_.model, 150, number);
        std::replace(r.prompt.begin(), r.prompt.end(), kPoison, kPoison + 1);
        r.sampling = {.temperature = 0, .logit_bias = {{kPoison, -100.0f}}};
        r.max_tokens = 14;
        return r;
    }

    /// Runs `broken` beside a sound request, which must give what it gives alone, then and later; returns what
    /// `broken` answered before it failed.
    std::vector<int32_t> fails_alone(Request broken) {
        const Answer expected = run_sound();
        Engine engine(*loaded_.model, *loaded_.backend, {.context = 512, .sequences = 2, .step_tokens = 128});
        Answer found;
        const RequestId first = engine.submit(std::move(broken)), second = engine.submit(sound(found));
        while (engine.step()) {
        }
        Result failed = engine.take(first);
        CHECK(failed.reason == FinishReason::error);
        CHECK(failed.error.find("NaN") != std::string::npos);
        found.tokens = engine.take(second).tokens;
        CHECK(found == expected);
        Answer later;  // in the memory that the broken one had
        later.tokens = engine.run(sound(later)).tokens;
        CHECK(later == expected);
        return failed.tokens;
    }

  private:
    static std::string poisoned(test::CheckpointCopy& copy) {
        std::string& rows = copy.weights.at("model.language_model.embed_tokens.weight").data;
        const size_t width = copy.config["text_config"]["hidden_size"].get<size_t>() * 2;
        for (size_t i = 0; i < width; ++i) rows[kPoison * width + i] = i % 2 == 0 ? '\xFF' : '\x7F';
        copy.write();
        return copy.dir.str();
    }
    Request sound(Answer& to) const {
        Request r = request(2);
        r.on_logits = [&to](int32_t, std::span<const float> row) {
            to.logits.insert(to.logits.end(), row.begin(), row.end());
        };
        return r;
    }
    Answer run_sound() {
        Answer a;
        a.tokens = Engine(*loaded_.model, *loaded_.backend, {.context = 512}).run(sound(a)).tokens;
        return a;
    }

    test::CheckpointCopy copy_;
    test::Loaded loaded_;
};

TEST_SUITE("cpu") {
    TEST_CASE("alone or beside others, steps of any size, with kept states or without: the same bits" *
              doctest::test_suite("slow")) {
        for (const char* checkpoint : {"base/ct", "dense/ct"})
            for (const auto make : {cpu, device}) {
                CAPTURE(checkpoint);
                test::Loaded l(parity(checkpoint), make());
                const auto requests = prompts(*l.model);
                const auto expected = alone(l, requests);
                CHECK(expected[0].logits.size() == 10 * static_cast<size_t>(l.model->info().vocab_rows));
                for (const int64_t rows : {1, 64, 512, 2048})
                    for (const int64_t cache : {0, 64 << 20}) {
                        CAPTURE(rows);
                        CAPTURE(cache);
                        Engine engine(
                            *l.model, *l.backend,
                            {.context = 1024, .sequences = 5, .step_tokens = rows, .cache_bytes = cache});
                        // From the second on with the states that the one before left.
                        for (unsigned order = 0; order < 3; ++order)
                            CHECK(together(engine, requests, order) == expected);
                        CHECK((engine.cache_stats().hits > 0) == (cache > 0));
                    }
            }
    }

    TEST_CASE("tokens that are forced run several rows a step, and change nothing") {
        for (const auto make : {cpu, device}) {
            test::Loaded l(parity("base/ct"), make());
            const auto prompt = random_ids(*l.model, 90, 1), forced = random_ids(*l.model, 19, 2);
            Answer one, several;
            const auto request = [&](Answer& to) {
                Request r = recorded(prompt, 0, to);
                r.max_tokens = 40;
                return r;
            };
            const auto after = [&](size_t token) {  // all at once, after that token
                return [&, token, n = size_t{0}]() mutable {
                    return n++ == token ? forced : std::vector<int32_t>();
                };
            };
            Engine engine(*l.model, *l.backend, {.context = 512, .sequences = 3});
            std::vector<Answer> others(2);
            const RequestId first = engine.submit(recorded(random_ids(*l.model, 200, 3), 2, others[0]));
            Request r = request(several);
            r.force = after(4);
            const RequestId id = engine.submit(std::move(r));
            const RequestId second = engine.submit(recorded(random_ids(*l.model, 20, 4), 4, others[1]));
            while (engine.step()) {
            }
            several.tokens = engine.take(id).tokens;
            CHECK(std::equal(forced.begin(), forced.end(), several.tokens.begin() + 5));
            CHECK((engine.take(first).error + engine.take(second).error).empty());

            // The same answer one row at a time: nothing else may come next.
            r = request(one);
            size_t at = 0;
            r.allow = [&](int32_t token) {
                return at < 5 || at >= 5 + forced.size() || token == several.tokens[at];
            };
            r.on_token = [&](int32_t) { return ++at > 0; };
            one.tokens = Engine(*l.model, *l.backend, {.context = 512}).run(std::move(r)).tokens;
            CHECK(one.tokens == several.tokens);
            const auto width = static_cast<size_t>(l.model->info().vocab_rows);
            one.logits.erase(one.logits.begin() + static_cast<ptrdiff_t>(5 * width),
                             one.logits.begin() + static_cast<ptrdiff_t>((5 + forced.size()) * width));
            CHECK(one == several);
        }
    }

    TEST_CASE("step inputs: every row of an answer may have its logits") {
        test::Loaded l(parity("base/ct"), cpu());
        const auto prompts = std::array{random_ids(*l.model, 70, 1), random_ids(*l.model, 5, 2)};
        const auto specs = l.model->state_specs({.kv = DType::F32, .conv = DType::F32});
        StatePool pool(*l.backend, specs, 2, 8);
        Workspace workspace(*l.backend, 64 << 20, 1 << 20);
        PlanCache plans(*l.model, *l.backend, pool, workspace, 4);
        const auto width = static_cast<size_t>(l.model->info().vocab_rows);
        const auto run = [&](StepKind kind, std::vector<Slice> slices) {
            BatchShape shape{.kind = kind,
                             .sequences = static_cast<int64_t>(slices.size()),
                             .pages = 4,
                             .vocab = l.model->info().vocab};
            for (const Slice& slice : slices) {
                shape.tokens += slice.count;
                shape.logit_rows += slice.logit_rows;
                pool.grow(slice.sequence->state, slice.begin + slice.count);
            }
            StepPlan& plan = plans.get(shape, PlanUse::sometimes);
            fill_inputs(plan, slices);
            plan.plan->run();
            for (const Slice& slice : slices) slice.sequence->state.length += slice.count;
            std::vector<float> logits(static_cast<size_t>(shape.logit_rows) * width);
            l.backend->download(logits.data(), plan.logits->data, plan.logits->bytes());
            return logits;
        };
        const auto sequences = [&] {
            std::array<Sequence, 2> list;
            for (size_t i = 0; i < 2; ++i) {
                list[i].request.prompt = list[i].tokens = prompts[i];
                const auto answer = random_ids(*l.model, 5, 7 + static_cast<unsigned>(i));
                list[i].tokens.insert(list[i].tokens.end(), answer.begin(), answer.end());
                list[i].state = pool.acquire();
                const int64_t rows = list[i].prompt_tokens();
                run(StepKind::prompt, {{&list[i], 0, rows, 1, false}});
            }
            return list;
        };
        auto drafts = sequences();
        const auto together =
            run(StepKind::answer, {{&drafts[0], 70, 5, 5, true}, {&drafts[1], 5, 3, 2, false}});
        REQUIRE(together.size() == 7 * width);
        for (Sequence& s : drafts) pool.release(s.state);

        auto singles = sequences();
        std::vector<float> expected;
        for (int64_t t = 0; t < 5; ++t) {
            const auto row = run(StepKind::answer, {{&singles[0], 70 + t, 1, 1, t == 4}});
            expected.insert(expected.end(), row.begin(), row.end());
        }
        for (int64_t t = 0; t < 3; ++t) {
            const auto row = run(StepKind::answer, {{&singles[1], 5 + t, 1, 1, false}});
            if (t > 0) expected.insert(expected.end(), row.begin(), row.end());
        }
        CHECK(std::memcmp(expected.data(), together.data(), together.size() * sizeof(float)) == 0);
        for (Sequence& s : singles) pool.release(s.state);
    }

    TEST_CASE(
        "a sequence whose hidden state is NaN ends with an error; the one beside it goes on unchanged") {
        for (const char* checkpoint : {"dense/bf16", "base/bf16"})
            for (const auto make : {cpu, device}) {
                CAPTURE(checkpoint);
                PoisonedModel m(checkpoint, make());
                Request in_prompt = m.request(1);
                in_prompt.prompt[100] = kPoison;  // in the second step that both prompts share
                CHECK(m.fails_alone(std::move(in_prompt)).empty());

                Request in_answer = m.request(1);
                int64_t tokens = 0;
                in_answer.sampling.logit_bias.clear();
                in_answer.on_token = [&](int32_t) { return ++tokens > 0; };
                in_answer.allow = [&](int32_t id) { return (id == kPoison) == (tokens == 4); };
                const auto answer = m.fails_alone(std::move(in_answer));
                REQUIRE(answer.size() == 5);
                CHECK(answer.back() == kPoison);
            }
    }

    TEST_CASE("a step that fails ends those in it; the others go on unchanged") {
        auto owned = std::make_unique<test::CountedBackend>(int64_t{1} << 34);
        test::CountedBackend& backend = *owned;
        test::Loaded l(parity("base/ct"), std::move(owned));
        const auto list = prompts(*l.model);
        const auto expected = alone(l, {list[5]});
        bool fails = false;
        backend.before_run = [&] {
            if (std::exchange(fails, false)) throw Error(ErrorKind::runtime, "out of luck");
        };
        Engine engine(*l.model, backend, {.context = 1024, .sequences = 2, .step_tokens = 128});
        Answer answering, waiting;
        const RequestId first = engine.submit(recorded(list[5], 0, answering));
        engine.step();
        engine.step();  // its prompt of 226 tokens; a row of its answer is launched
        const RequestId second = engine.submit(recorded(list[9], 1, waiting));
        fails = true;
        engine.step();  // launches the second's prompt
        CHECK(engine.finished(second));
        CHECK(!engine.finished(first));
        while (engine.step()) {
        }
        const Result lost = engine.take(second);
        CHECK(lost.reason == FinishReason::error);
        CHECK(lost.error == "out of luck");
        answering.tokens = engine.take(first).tokens;
        CHECK(answering == expected[0]);

        backend.before_run = [] { throw Error(ErrorKind::device, "gone"); };
        const RequestId third = engine.submit(recorded(list[3], 0, waiting)),
                        fourth = engine.submit(recorded(list[4], 1, waiting)),
                        queued = engine.submit(recorded(list[5], 2, waiting));
        CHECK_THROWS_AS(engine.step(), Error);
        for (const RequestId id : {third, fourth, queued}) CHECK(engine.take(id).error == "gone");
    }
}

}  // namespace
}  // namespace quern
