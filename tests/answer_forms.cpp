// Answers that have a form: ids that are left out before anybody asks for them are none that may follow.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <random>

#include "counted_backend.h"
#include "engine_harness.h"
#include "tools/engine/answer_reader.h"
#include "tools/engine/engine.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

/// Writes an answer of random ids that are allowed, and looks at each place at which of all ids are left out.
struct Follow {
    explicit Follow(const AnswerRules& rules)
        : loaded(test::source_dir() + "/models/demo", test::cpu(), true) {
        reader = std::make_unique<AnswerReader>(*loaded.model, rules);
        reader->opening();
        reader->attach(request, [](const AnswerDelta&) { return true; });
        REQUIRE(request.narrow);
    }
    /// False at the end of the answer.
    bool step() {
        const int64_t vocab = loaded.model->info().vocab;
        std::vector<float> logits(static_cast<size_t>(vocab), 1.0f);
        request.narrow(logits);
        std::vector<int32_t> allowed;
        int left = 0, wrong = 0;
        for (int32_t id = 0; id < vocab; ++id) {
            const bool stays = logits[static_cast<size_t>(id)] == 1.0f;
            left += stays;
            wrong += !stays && request.allow(id);
            if (request.allow(id) && !loaded.model->tokenizer()->is_added(id)) allowed.push_back(id);
        }
        CHECK(wrong == 0);
        least = std::min(least, left);
        if (allowed.empty()) return false;
        const int32_t id = allowed[draw() % allowed.size()];
        return request.on_token(id);
    }

    test::Loaded loaded;
    Request request;
    std::unique_ptr<AnswerReader> reader;
    std::mt19937 draw{3};
    int least = 1 << 20;
};

TEST_SUITE("cpu") {
    TEST_CASE("answer forms: only ids that may not follow are left out, and most of them are") {
        const ordered_json person = {
            {"type", "object"},
            {"properties",
             {{"name", {{"type", "string"}, {"minLength", 40}}}, {"age", {{"type", "integer"}}}}},
            {"required", {"name", "age"}}};
        for (const bool chat : {false, true}) {
            Follow follow({.chat = chat, .grammar = Grammar::json(person)});
            int steps = 0;
            while (steps < 300 && follow.step()) ++steps;
            CHECK(steps > 8);
            CHECK(follow.least < 100);
        }
    }

    TEST_CASE("answer forms: only ids that may not follow in a call are left out") {
        const ordered_json tools = {{{"type", "function"},
                                     {"function",
                                      {{"name", "weigh"},
                                       {"parameters",
                                        {{"type", "object"},
                                         {"properties", {{"grams", {{"type", "integer"}}}}},
                                         {"required", {"grams"}}}}}}}};
        Follow follow({.tools = tools, .calls = AnswerRules::Calls::required});
        int steps = 0;
        while (steps < 200 && follow.step()) ++steps;
        CHECK(steps > 8);
        CHECK(follow.least < 100);
    }

    TEST_CASE("answer forms: what is left out before changes no answer") {
        test::Loaded l(test::source_dir() + "/models/demo", test::cpu(), true);
        Engine engine(*l.model, *l.backend, {.context = 1024});
        const auto answer = [&](uint64_t seed, bool narrowed) {
            AnswerReader reader(
                *l.model,
                {.chat = false, .grammar = Grammar::json({{"type", "string"}, {"minLength", 500}})});
            Request r;
            r.prompt = l.model->tokenizer()->encode("Grain by grain", Tokenizer::Markers::literal);
            r.sampling = {.temperature = 3, .top_k = 0, .seed = seed};
            r.max_tokens = 60;
            reader.attach(r, [](const AnswerDelta&) { return true; });
            if (!narrowed) r.narrow = nullptr;
            return engine.run(std::move(r)).tokens;
        };
        for (const uint64_t seed : {1, 2, 3, 4}) CHECK(answer(seed, true) == answer(seed, false));
    }
}

}  // namespace
}  // namespace quern
