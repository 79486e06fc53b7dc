// On a device the next step is launched before callbacks learn of the last one's tokens, unless it may have drafts. No answer may show
// it.
#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "counted_backend.h"
#include "engine_harness.h"
#include "tools/engine/replay_drafter.h"

namespace quern {
namespace {

using test::cpu, test::device, test::parity, test::random_ids;

/// The backend of test::device().
struct Device {
    Device() {
        auto owned = std::make_unique<test::CountedBackend>(int64_t{1} << 34);
        backend = owned.get();
        loaded = std::make_unique<test::Loaded>(parity("base/ct"), std::move(owned));
    }
    const Model& model() const { return *loaded->model; }
    std::unique_ptr<Engine> engine(const EngineOptions& options) {
        return std::make_unique<Engine>(*loaded->model, *backend, options);
    }
    test::CountedBackend* backend;
    std::unique_ptr<test::Loaded> loaded;
};

Request drawn(const Model& model, unsigned number, int64_t tokens) {
    Request r;
    r.prompt = random_ids(model, 20 + 31 * number, number);
    r.sampling = {.temperature = 1.0f, .seed = number};
    r.max_tokens = tokens;
    return r;
}

void finish(Engine& engine) {
    while (engine.step()) {
    }
}

/// What callbacks of a request may do, and what came of it.
struct Trial {
    std::vector<int32_t> told;
    Request request;
};
using Trials = std::vector<std::unique_ptr<Trial>>;

/// The numbers 0 to 4: one that goes to its end, one that its callback stops, one with tokens that must follow, one whose
/// tokens depend on those that it was told of, one with an id that stops it.
std::unique_ptr<Trial> trial(const Model& model, unsigned number, int32_t stop_id) {
    auto made = std::make_unique<Trial>();
    Trial* t = made.get();
    t->request = drawn(model, number, 14);
    t->request.on_token = [t, number](int32_t id) {
        t->told.push_back(id);
        return number != 1 || t->told.size() < 6;
    };
    if (number == 2)
        t->request.force = [t] {
            return t->told.size() == 4 ? std::vector<int32_t>{5, 6, 7} : std::vector<int32_t>();
        };
    if (number == 3)
        t->request.allow = [t](int32_t id) { return id % 3 == static_cast<int>(t->told.size() % 3); };
    if (number == 4) t->request.stop_ids = {stop_id};
    return made;
}

Trials all_trials(const Model& model, int32_t stop_id) {
    Trials list;
    for (unsigned i = 0; i < 5; ++i) list.push_back(trial(model, i, stop_id));
    return list;
}

TEST_SUITE("cpu") {
    TEST_CASE(
        "engine: the next step is launched before callbacks are called, but for an answer's last token") {
        Device d;
        std::string order;
        d.backend->before_run = [&] { order += 'r'; };
        const auto requests = [&](Engine& engine) {
            order.clear();
            for (const char name : {'a', 'b'}) {
                Request r = drawn(d.model(), 1, name == 'a' ? 4 : 3);
                r.on_token = [&order, name](int32_t) { return order += name, true; };
                engine.submit(std::move(r));
            }
            finish(engine);
            return order;
        };
        CHECK(requests(*d.engine({.context = 256, .sequences = 2})) == "rrabrabbraa");
        CHECK(requests(*d.engine(
                  {.context = 256, .sequences = 2, .speculation = {.kind = DrafterKind::lookup}})) ==
              "rabrrabbraa");  // a prompt's last step may be followed by drafts
    }

    TEST_CASE("engine: callbacks that stop, force and allow give the same answers on a device") {
        test::Loaded plain(parity("base/ct"), cpu());
        Device d;
        const auto alone = [&](Request r) {
            return Engine(*plain.model, *plain.backend, {.context = 256}).run(std::move(r));
        };
        const int32_t stop_id = alone(drawn(*plain.model, 4, 9)).tokens[6];
        // Some with drafts in every step, so that steps of the others have none only where those have ended.
        for (const bool drafts : {false, true}) {
            CAPTURE(drafts);
            const auto expected = all_trials(*plain.model, stop_id), got = all_trials(d.model(), stop_id);
            EngineOptions options{.context = 256, .sequences = 3, .step_tokens = 64};
            auto drafter = std::make_shared<ReplayDrafter>(std::vector<double>{0.8, 0.6, 0.4}, 5);
            std::vector<Result> results;
            for (size_t i = 0; i < got.size(); ++i) {
                results.push_back(alone(expected[i]->request));
                drafter->expect(got[i]->request.prompt, results[i].tokens);
                got[i]->request.drafts.full = i < 3;
            }
            if (drafts) options.speculation.kind = DrafterKind::automatic, options.drafter = drafter;
            const auto engine = d.engine(options);
            std::vector<RequestId> ids;
            for (const auto& t : got) ids.push_back(engine->submit(t->request));
            finish(*engine);
            int64_t drafted = 0;
            for (size_t i = 0; i < got.size(); ++i) {
                CAPTURE(i);
                const Result together = engine->take(ids[i]);
                drafted += together.drafted;
                CHECK(together.reason == results[i].reason);
                CHECK(together.tokens == results[i].tokens);
                CHECK(got[i]->told == expected[i]->told);
                CHECK(got[i]->told == together.tokens);
            }
            CHECK((drafted > 0) == drafts);
            CHECK(expected[1]->told.size() == 6);
            CHECK(expected[2]->told.size() == 14);
            CHECK(std::vector(expected[2]->told.begin() + 4, expected[2]->told.begin() + 7) ==
                  std::vector<int32_t>{5, 6, 7});
            CHECK(expected[4]->told.size() <= 6);
        }
    }

    TEST_CASE("engine: what a callback ends may be taken and followed by others while its last step runs") {
        Device d;
        const auto engine = d.engine({.context = 256, .sequences = 2});
        const Result alone = d.engine({.context = 256})->run(drawn(d.model(), 0, 40));
        const Result next_alone = d.engine({.context = 256})->run(drawn(d.model(), 3, 8));
        const RequestId first = engine->submit(drawn(d.model(), 0, 40));
        for (int round = 0; round < 4; ++round) {
            CAPTURE(round);
            Request ended = drawn(d.model(), 1, 40);
            ended.on_token = [n = 0, round](int32_t) mutable { return ++n <= round; };
            const RequestId second = engine->submit(std::move(ended));
            while (!engine->finished(second)) engine->step();
            CHECK(engine->take(second).reason == FinishReason::cancelled);
            const RequestId third = engine->submit(drawn(d.model(), 3, 8));
            while (!engine->finished(third)) engine->step();
            CHECK(engine->take(third).tokens == next_alone.tokens);
        }
        finish(*engine);
        CHECK(engine->take(first).tokens == alone.tokens);
        CHECK(!engine->step());
    }

    TEST_CASE("engine: after cancel no callback is called, and requests come in time for the next step") {
        Device d;
        const auto engine = d.engine({.context = 256, .sequences = 2});
        size_t told = 0;
        Request r = drawn(d.model(), 0, 100);
        r.on_token = [&](int32_t) { return ++told > 0; };
        const RequestId first = engine->submit(std::move(r));
        for (int i = 0; i < 5; ++i) engine->step();
        const size_t before = told;
        CHECK(before > 0);
        engine->cancel(first);
        engine->step();
        CHECK(told == before);
        REQUIRE(engine->finished(first));
        const Result cancelled = engine->take(first);
        CHECK(cancelled.reason == FinishReason::cancelled);
        CHECK(cancelled.tokens.size() == told);
        CHECK(!engine->step());

        const RequestId second = engine->submit(drawn(d.model(), 0, 100));
        for (int i = 0; i < 3; ++i) engine->step();
        RequestId third = 0;
        int64_t prompt_done = -1;
        engine->step([&] {
            if (third != 0) return;
            Request late = drawn(d.model(), 1, 2);
            late.on_prefill = [&](int64_t done) { prompt_done = done; };
            third = engine->submit(std::move(late));
        });
        CHECK(prompt_done == 0);  // its prompt is the step that runs now
        engine->step();
        CHECK(prompt_done == 51);
        CHECK(!engine->finished(second));
    }

    TEST_CASE("engine: a callback that throws ends its request only") {
        Device d;
        const auto engine = d.engine({.context = 256, .sequences = 2});
        const Result alone = d.engine({.context = 256})->run(drawn(d.model(), 0, 12));
        const RequestId first = engine->submit(drawn(d.model(), 0, 12));
        Request r = drawn(d.model(), 1, 12);
        r.on_token = [n = 0](int32_t) mutable {
            if (++n == 3) throw std::runtime_error("no more");
            return true;
        };
        const RequestId second = engine->submit(std::move(r));
        finish(*engine);
        const Result ended = engine->take(second);
        CHECK(ended.reason == FinishReason::error);
        CHECK(ended.error == "no more");
        CHECK(ended.tokens.size() == 3);
        CHECK(engine->take(first).tokens == alone.tokens);
    }

    TEST_CASE("engine: when the device fails, callbacks still learn of what was chosen before") {
        Device d;
        const auto engine = d.engine({.context = 256});
        std::vector<int32_t> told;
        Request r = drawn(d.model(), 0, 12);
        r.on_token = [&](int32_t id) { return told.push_back(id), true; };
        const RequestId id = engine->submit(std::move(r));
        engine->step();
        d.backend->before_run = [] { throw Error(ErrorKind::device, "gone"); };
        CHECK_THROWS_AS(engine->step(), Error);
        const Result lost = engine->take(id);
        CHECK(lost.reason == FinishReason::error);
        CHECK(lost.tokens.size() == 2);
        CHECK(told == lost.tokens);
    }
}

}  // namespace
}  // namespace quern
