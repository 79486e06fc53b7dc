// The demo checkpoint gives the tokens that transformers gives in float32 with the same dequantised weights.
// Vectors: tests/vectors/demo/greedy.json, made by scripts/verify_demo.py.
#include <fstream>

#include "engine_harness.h"
#include "ggml-like/json.h"
#include "models/tokenizer.h"
#include "tools/engine/chat_session.h"

#include <doctest/doctest.h>

namespace quern {
namespace {

const std::string kRoot = test::source_dir();

TEST_SUITE("model") {
    TEST_CASE("demo: greedy tokens of transformers") {
        std::ifstream file(kRoot + "/tests/vectors/demo/greedy.json");
        const nlohmann::json cases = nlohmann::json::parse(file);
        REQUIRE(cases.size() >= 10);
        const auto backend = make_cpu_backend(2);
        const auto model = load_model(kRoot + "/models/demo", *backend, {});
        Engine engine(*model, *backend, {.context = 1024});
        for (const auto& c : cases) {
            const auto expected = c.at("generated").get<std::vector<int32_t>>();
            CAPTURE(c.at("task").get<std::string>());
            Request request;
            request.prompt = c.at("prompt").get<std::vector<int32_t>>();
            request.sampling.temperature = 0;
            request.max_tokens = static_cast<int64_t>(expected.size());
            CHECK(engine.run(std::move(request)).tokens == expected);
        }
    }

    TEST_CASE("demo: a conversation through chat format, tokenizer and engine") {
        const auto backend = make_cpu_backend(2);
        const auto model = load_model(kRoot + "/models/demo", *backend, {});
        CHECK(model->info().vocab < model->info().vocab_rows);
        Engine engine(*model, *backend, {.context = 512});
        ChatSession session(engine);
        const std::vector<Message> question = {{.role = "user", .content = "What is the capital of France?"}};
        std::string streamed;
        ChatCallbacks callbacks;
        callbacks.content = [&](const std::string& text) { streamed += text; };
        ChatSettings settings;
        settings.sampling.temperature = 0;
        const ChatAnswer answer = session.respond(question, settings, callbacks);
        CHECK(answer.reason == FinishReason::stop);
        CHECK(answer.message.content == "The capital of France is Paris.");
        CHECK(streamed == answer.message.content);
        CHECK(answer.reasoning_tokens > 0);
        settings.thinking_budget = 1;  // the thinking is closed in its place, and the answer comes
        const ChatAnswer hurried = session.respond(question, settings, {});
        CHECK(hurried.reasoning_tokens <= 2);
        CHECK(hurried.message.content.find("Paris") != std::string::npos);
    }
}

}  // namespace
}  // namespace quern
