// /v1/completions with several prompts, and with the log-probabilities of a prompt.
#include <fmt/format.h>

#include <cmath>

#include "serve_client.h"

namespace quern {
namespace {

using namespace test;

const char* const kFrance = "The capital of France";
const char* const kItaly = "The capital of Italy";

json completion_of(json prompt, json more = {}) {
    json body = {{"prompt", std::move(prompt)}, {"max_tokens", 3}, {"temperature", 0}};
    body.update(more.is_null() ? json::object() : more);
    return body;
}

json complete(const ServerProcess& server, const json& body) {
    const Reply r = post(server, "/v1/completions", body);
    CAPTURE(r.body.dump());
    REQUIRE(r.status == 200);
    return r.body;
}

/// What the server gives for `next` after the tokens before it, when asked for one token.
double logprob_of(const ServerProcess& server, const json& before, const std::string& next) {
    const json answer = complete(server, completion_of(before, {{"max_tokens", 1}, {"logprobs", 20}}));
    const json& top = answer["choices"][0]["logprobs"]["top_logprobs"][0];
    return top.contains(next) ? top[next].get<double>() : NAN;
}

TEST_SUITE("model") {
    TEST_CASE("serve: several prompts in one request are answered as they are alone") {
        const ServerProcess server({"-np", "2"});
        const json france = complete(server, completion_of(kFrance)),
                   italy = complete(server, completion_of(kItaly));
        CHECK(france["choices"][0]["text"] != italy["choices"][0]["text"]);
        const auto ids = [&](const char* text) {
            return post(server, "/tokenize", {{"content", text}}).body["tokens"];
        };
        for (const json& prompts : {json{kFrance, kItaly}, json{ids(kFrance), ids(kItaly)}}) {
            const json both = complete(server, completion_of(prompts, {{"n", 2}, {"echo", true}}));
            REQUIRE(both["choices"].size() == 4);
            for (size_t i = 0; i < 4; ++i) {
                const bool first = i < 2;
                CHECK(both["choices"][i]["index"] == i);
                CHECK(both["choices"][i]["text"] ==
                      (first ? kFrance : kItaly) +
                          (first ? france : italy)["choices"][0]["text"].get<std::string>());
            }
            CHECK(both["usage"]["prompt_tokens"] == france["usage"]["prompt_tokens"].get<int64_t>() +
                                                        italy["usage"]["prompt_tokens"].get<int64_t>());
            CHECK(both["usage"]["completion_tokens"] == 12);
        }

        json body = completion_of({kFrance, kItaly}, {{"stream", true}, {"echo", true}});
        std::string text[2];
        const auto events = stream(server, body, "/v1/completions");
        REQUIRE(events.size() > 4);
        for (size_t i = 0; i + 1 < events.size(); ++i) {
            const json event = json::parse(events[i]);
            for (const json& c : event["choices"]) text[c["index"].get<size_t>()] += c["text"];
        }
        CHECK(text[0] == kFrance + france["choices"][0]["text"].get<std::string>());
        CHECK(text[1] == kItaly + italy["choices"][0]["text"].get<std::string>());
    }

    TEST_CASE("serve: a prompt's log-probabilities are those of its tokens one by one") {
        const ServerProcess server({"-np", "2"});
        const std::string prompt = "The capital of France is Paris.";
        const json answer =
            complete(server, completion_of(prompt, {{"echo", true}, {"logprobs", 2}, {"max_tokens", 1}}));
        const json& report = answer["choices"][0]["logprobs"];
        const json ids = post(server, "/tokenize", {{"content", prompt}}).body["tokens"];
        REQUIRE(report["tokens"].size() == ids.size() + 1);
        CHECK(report["token_logprobs"][0].is_null());
        CHECK(report["top_logprobs"][0].is_null());
        std::string text;
        int compared = 0;
        for (size_t i = 0; i < ids.size(); ++i) {
            CHECK(report["text_offset"][i] == text.size());
            const std::string token = report["tokens"][i];
            text += token;
            if (i == 0) continue;
            CHECK(report["top_logprobs"][i].size() == 2);
            const double alone =
                logprob_of(server, json(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(i)), token);
            if (std::isnan(alone)) continue;  // not among the likeliest 20
            CHECK(report["token_logprobs"][i].get<double>() == doctest::Approx(alone).epsilon(1e-3));
            ++compared;
        }
        CHECK(text == prompt);
        CHECK(compared >= 3);

        const json nothing =
            complete(server, completion_of(prompt, {{"echo", true}, {"logprobs", 0}, {"max_tokens", 0}}));
        CHECK(nothing["choices"][0]["text"] == prompt);
        CHECK(nothing["choices"][0]["finish_reason"] == "length");
        CHECK(nothing["usage"]["completion_tokens"] == 0);
        for (size_t i = 1; i < ids.size(); ++i)
            CHECK(nothing["choices"][0]["logprobs"]["token_logprobs"][i] == report["token_logprobs"][i]);
    }

    TEST_CASE("serve: prompts that cannot be answered are told why") {
        const ServerProcess server({"-np", "1", "--queue", "2", "-c", "128"});
        const auto refused = [&](json prompt, const char* why) {
            const Reply r = post(server, "/v1/completions", completion_of(std::move(prompt)));
            CHECK(r.status == 400);
            CHECK(r.body["error"]["param"] == "prompt");
            const std::string message = r.body["error"]["message"];
            CHECK_MESSAGE(message.find(why) != std::string::npos, message);
        };
        refused(json::array(), "empty");
        refused({"one", ""}, "empty");
        refused({"one", 2}, "must be a text");
        refused({{1, 2}, {"x"}}, "must be a text");
        refused({{1, 2}, {1, -3}}, "token ids");
        refused(json(129, "one"), "128 at once");
        refused({"one", "two", "three", "four"}, "takes 3 at once");
        refused({"one", std::string(2000, '7')}, "maximum context length");
        CHECK(post(server, "/v1/completions", completion_of({"one", "two"})).status == 200);
    }
}

}  // namespace
}  // namespace quern
