// Ollama's API, llama.cpp's own, and what clients are told to use the server.
#include <cstdlib>

#include "ggml-like/error.h"
#include "serve_client.h"
#include "tools/serve/client_config.h"

namespace quern {
namespace {

using namespace test;

/// Lines of a streamed answer of Ollama's API.
std::vector<json> lines(const ServerProcess& server, const std::string& path, const json& body) {
    auto c = server.client();
    const auto r = c.Post(path, body.dump(), "application/json");
    REQUIRE(r);
    REQUIRE(r->status == 200);
    CHECK(r->get_header_value("Content-Type") == "application/x-ndjson");
    std::vector<json> out;
    for (size_t at = 0; at < r->body.size();) {
        const size_t end = r->body.find('\n', at);
        REQUIRE(end != std::string::npos);
        out.push_back(json::parse(r->body.substr(at, end - at)));
        at = end + 1;
    }
    return out;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("client config: names the address, the model, the key and the context") {
        ServeOptions o;
        o.host = "0.0.0.0";
        o.port = 9000;
        o.keys = {"it's"};
        o.aliases = {{"qwen", {}}};
        o.context = 65536;
        for (const char* client : {"claude", "codex", "opencode", "openwebui", "cline", "continue", "zed"}) {
            CAPTURE(client);
            const std::string text = client_config(client, o);
            CHECK(text.find("http://127.0.0.1:9000") != std::string::npos);
            CHECK(text.find("qwen") != std::string::npos);
            if (client != std::string("openwebui")) CHECK(text.find("65536") != std::string::npos);
        }
        CHECK(client_config("claude", o).find(R"(ANTHROPIC_AUTH_TOKEN='it'\''s')") != std::string::npos);
        const json code = json::parse(client_config("opencode", o));
        CHECK(code["provider"]["quern"]["options"]["apiKey"] == "it's");
        CHECK(code["provider"]["quern"]["models"]["qwen"]["limit"]["context"] == 65536);
        CHECK(json::parse(
                  client_config("zed", o))["language_models"]["openai_compatible"]["quern"]["api_url"] ==
              "http://127.0.0.1:9000/v1");
        CHECK(client_config("codex", o).find("wire_api = \"responses\"") != std::string::npos);
        CHECK_THROWS_AS(client_config("emacs", o), Error);
        const std::string command =
            std::string("eval \"$(") + QUERN_BINARY +
            " serve --alias qwen --print-config claude)\" && test \"$ANTHROPIC_MODEL\" = qwen";
        CHECK(std::system(command.c_str()) == 0);
    }
}

TEST_SUITE("model") {
    TEST_CASE("serve: Ollama's clients get what they expect") {
        const ServerProcess server({"--alias", "demo"});
        json body = {{"model", "demo:latest"},
                     {"messages", {{{"role", "user"}, {"content", "What is the capital of France?"}}}},
                     {"options", {{"temperature", 0}, {"num_ctx", 4096}, {"num_predict", 100}}},
                     {"keep_alive", "5m"}};
        std::string content, thinking;
        const auto all = lines(server, "/api/chat", body);
        for (const json& line : all) {
            CHECK(line["model"] == "demo");
            content += line["message"]["content"].get<std::string>();
            thinking += line["message"].value("thinking", "");
        }
        CHECK(content == "The capital of France is Paris.");
        CHECK(!thinking.empty());
        CHECK(all.back()["done"] == true);
        CHECK(all.back()["done_reason"] == "stop");
        CHECK(all.back()["eval_count"] > 5);
        body["stream"] = body["think"] = false;
        body["tools"] =
            json::array({json::parse(R"({"type":"function","function":{"name":"get_weather","parameters":
            {"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}})")});
        body["messages"][0]["content"] = "What is the weather in Paris?";
        const Reply call = post(server, "/api/chat", body);
        REQUIRE(call.status == 200);
        const json message = call.body["message"];
        REQUIRE(message.contains("tool_calls"));
        CHECK(message["tool_calls"][0]["function"] ==
              json{{"name", "get_weather"}, {"arguments", {{"city", "Paris"}}}});
        body["messages"].push_back(message);
        body["messages"].push_back(
            {{"role", "tool"}, {"tool_name", "get_weather"}, {"content", "17 degrees, rainy"}});
        CHECK(post(server, "/api/chat", body).body["message"]["content"].get<std::string>().find("17") !=
              std::string::npos);

        const json raw = {{"model", "demo"},
                          {"prompt", "The capital of France"},
                          {"raw", true},
                          {"stream", false},
                          {"options", {{"temperature", 0}, {"num_predict", 2}}}};
        const Reply generated = post(server, "/api/generate", raw);
        CHECK(generated.body["response"] == " is Paris");
        CHECK(generated.body["done_reason"] == "length");
        const json fill = {{"model", "demo"},
                           {"prompt", "def f("},
                           {"suffix", "return x"},
                           {"stream", false},
                           {"options", {{"num_predict", 3}}}};
        const Reply filled = post(server, "/api/generate", fill);
        CHECK(filled.status == 200);
        CHECK(filled.body["prompt_eval_count"] > 5);
        CHECK(filled.body["eval_count"] <= 3);
        CHECK(post(server, "/api/generate", {{"model", "demo"}}).body["done_reason"] == "load");

        auto c = server.client();
        CHECK(json::parse(c.Get("/api/tags")->body)["models"][0]["name"] == "demo");
        CHECK(json::parse(c.Get("/api/ps")->body)["models"][0]["context_length"] > 0);
        CHECK(json::parse(c.Get("/api/version")->body)["version"].is_string());
        const Reply shown = post(server, "/api/show", {{"model", "demo:latest"}});
        const std::string family = shown.body["details"]["family"];
        CHECK(shown.body["model_info"][family + ".context_length"] > 0);
        CHECK(post(server, "/api/show", {{"model", "gone"}}).status == 404);
        const Reply wrong = post(server, "/api/chat", {{"messages", "x"}});
        CHECK(wrong.status == 400);
        CHECK(wrong.body["error"].is_string());
    }

    TEST_CASE("serve: llama.cpp's completion and infill, and what evaluation tools ask") {
        const ServerProcess server;
        const json body = {{"prompt", "The capital of France"}, {"n_predict", 2}, {"temperature", 0}};
        const Reply whole = post(server, "/completion", body);
        REQUIRE(whole.status == 200);
        CHECK(whole.body["content"] == " is Paris");
        CHECK(whole.body["stop_type"] == "limit");
        CHECK(whole.body["tokens_predicted"] == 2);
        std::string content;
        const auto events = stream(server, body, "/completion");
        for (const std::string& e : events) content += json::parse(e)["content"].get<std::string>();
        CHECK(content == " is Paris");
        CHECK(json::parse(events.back())["stop"] == true);
        const json fill = {{"input_prefix", "int main() {"},
                           {"input_suffix", "}"},
                           {"n_predict", 4},
                           {"temperature", 0},
                           {"ignore_eos", true}};
        const Reply filled = post(server, "/infill", fill);
        REQUIRE(filled.status == 200);
        CHECK(filled.body["tokens_predicted"] == 4);
        json more = fill;
        more["input_extra"] = {{{"filename", "a.h"}, {"text", "int x;"}}};
        CHECK(post(server, "/infill", more).body["tokens_evaluated"] > filled.body["tokens_evaluated"]);
        auto c = server.client();
        CHECK(json::parse(c.Get("/tokenizer_info")->body)["eos_token"].is_string());
        CHECK(json::parse(c.Get("/version")->body)["version"].is_string());
    }

    TEST_CASE("serve: thinking can be ended while the answer is written") {
        const ServerProcess server({"--api-key", "secret,other"});
        json body = question("What is 3 + 4?");
        body["stream"] = true;
        body["ignore_eos"] = true;
        body["max_tokens"] = 3000;
        body["logit_bias"] = json::object();
        const json ids =
            json::parse(server.client()
                            .Post("/tokenize", {{"Authorization", "Bearer secret"}},
                                  R"({"content":"</think>","parse_special":true})", "application/json")
                            ->body)["tokens"];
        REQUIRE(ids.size() == 1);
        body["logit_bias"][std::to_string(ids[0].get<int>())] = -100;  // it would think for ever
        Raw raw(server.port());
        raw.send(http("/v1/chat/completions", body.dump(),
                      "Authorization: Bearer secret\r\nConnection: close\r\n"));
        std::string all;
        while (all.find("\"id\":\"") == std::string::npos) all += raw.receive();
        const size_t at = all.find("\"id\":\"") + 6;
        const std::string id = all.substr(at, all.find('"', at) - at);
        const json ask = {{"id", id}, {"action", "reasoning_end"}};
        const auto control = [&](const char* key) {
            return server.client()
                .Post("/v1/chat/completions/control", {{"Authorization", key}}, ask.dump(),
                      "application/json")
                ->status;
        };
        CHECK(control("Bearer other") == 404);
        CHECK(control("Bearer secret") == 200);
        for (std::string piece = raw.receive(); !piece.empty(); piece = raw.receive()) all += piece;
        CHECK(all.find("{\"content\":\"") != std::string::npos);
        CHECK(control("Bearer secret") == 404);
    }
}

}  // namespace quern
