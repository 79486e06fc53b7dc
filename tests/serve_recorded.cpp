// Sessions as coding agents and chat pages send them (tests/vectors/agents), and what they must hear: none is refused, the
// events come in the order that the clients' readers expect, the next turn finds what the last one left.
#include <fstream>

#include "serve_client.h"

namespace quern {
namespace {

using namespace test;

/// What a client's reader takes from an answer.
struct Heard {
    std::vector<std::string> events;  // runs of the same kind count once
    std::string text, finish, name, arguments;
    int64_t cached = -1;  // of the prompt's tokens; -1: not said

    void add(const std::string& kind) {
        if (events.empty() || events.back() != kind) events.push_back(kind);
    }
    void take_usage(const json& usage) { cached = usage["prompt_tokens_details"]["cached_tokens"]; }
};

bool has_text(const json& delta, const char* name) {
    const auto found = delta.find(name);
    return found != delta.end() && found->is_string() && !found->get<std::string>().empty();
}

std::string kind_of(const json& choice) {
    const json& delta = choice["delta"];
    if (choice["finish_reason"].is_string()) return "finish";
    if (delta.contains("tool_calls")) return "call";
    if (has_text(delta, "reasoning_content")) return "reasoning";
    if (has_text(delta, "content")) return "content";
    return delta.contains("role") ? "role" : "empty";
}

void hear_chunk(const json& chunk, Heard& heard) {
    if (chunk["choices"].empty()) {
        heard.add("usage");
        heard.take_usage(chunk["usage"]);
        return;
    }
    const json &choice = chunk["choices"][0], &delta = choice["delta"];
    heard.add(kind_of(choice));
    if (choice["finish_reason"].is_string()) heard.finish = choice["finish_reason"];
    if (has_text(delta, "content")) heard.text += delta["content"];
    if (!delta.contains("tool_calls")) return;
    const json& call = delta["tool_calls"][0];
    if (call["function"].contains("name")) heard.name += call["function"]["name"];
    heard.arguments += call["function"]["arguments"];
}

Heard hear(const std::string& body, bool streamed) {
    Heard heard;
    if (!streamed) {
        const json reply = json::parse(body);
        heard.text = reply["choices"][0]["message"]["content"];
        heard.finish = reply["choices"][0]["finish_reason"];
        heard.take_usage(reply["usage"]);
        return heard;
    }
    const std::string head = "data: ";
    for (size_t at = body.find(head); at != std::string::npos; at = body.find(head, at)) {
        at += head.size();
        const std::string data = body.substr(at, body.find('\n', at) - at);
        if (data == "[DONE]")
            heard.add(data);
        else
            hear_chunk(json::parse(data), heard);
    }
    return heard;
}

void check_call(const Heard& heard, const json& call) {
    CHECK(heard.name == call["name"]);
    const json arguments = json::parse(heard.arguments, nullptr, false);
    REQUIRE(arguments.is_object());
    CHECK(arguments["city"].is_string());
    if (call.contains("arguments")) CHECK(arguments == call["arguments"]);
}

void check_answer(const Heard& heard, const json& expected) {
    CHECK(heard.finish == expected["finish"]);
    if (expected.contains("events"))
        CHECK(heard.events == expected["events"].get<std::vector<std::string>>());
    if (expected.contains("text")) CHECK(heard.text == expected["text"]);
    if (expected.contains("cached")) CHECK(heard.cached >= expected["cached"].get<int64_t>());
    if (expected.contains("call"))
        check_call(heard, expected["call"]);
    else
        CHECK(heard.text != "");
    if (!expected.contains("json")) return;
    const json answer = json::parse(heard.text, nullptr, false);
    REQUIRE(answer.is_object());
    for (const json& key : expected["json"]) CHECK(answer.contains(key.get<std::string>()));
}

void run_session(const std::string& client) {
    const ServerProcess server({"--temp", "0", "--no-vision"});  // their images become words
    auto c = server.client();
    std::ifstream file(QUERN_SOURCE_DIR "/tests/vectors/agents/" + client + ".json");
    const json session = json::parse(file);
    REQUIRE(session["requests"].size() >= 3);
    for (size_t i = 0; i < session["requests"].size(); ++i) {
        const json& request = session["requests"][i];
        CAPTURE(client);
        CAPTURE(i);
        const auto reply =
            c.Post(request["path"].get<std::string>(), request["body"].dump(), "application/json");
        REQUIRE(reply);
        CAPTURE(reply->body);
        REQUIRE(reply->status == 200);
        CHECK(reply->get_header_value("X-Quern-Ignored") == request["expected"].value("ignored", ""));
        check_answer(hear(reply->body, request["body"].value("stream", false)), request["expected"]);
    }
}

}  // namespace

TEST_SUITE("model") {
    TEST_CASE("serve: a session of OpenCode") { run_session("opencode"); }
    TEST_CASE("serve: a session of Cline") { run_session("cline"); }
    TEST_CASE("serve: a session of Qwen Code") { run_session("qwen-code"); }
    TEST_CASE("serve: a session of Open WebUI") { run_session("open-webui"); }
}

}  // namespace quern
