// The real server with the demo checkpoint, through an HTTP client and through bare sockets.
#include <fmt/format.h>

#include <filesystem>

#include "checkpoint_writer.h"
#include "serve_client.h"
#include "tools/bench/serve_load.h"

namespace quern {
namespace {

using namespace test;

const json kWeather =
    json::parse(R"({"type":"function","function":{"name":"get_weather","parameters":{"type":"object",
    "properties":{"city":{"type":"string"},"days":{"type":"integer"}},"required":["city"]}}})");
TEST_SUITE("model") {
    TEST_CASE("serve: answers, streams and counts") {
        const ServerProcess server({"--alias", "fast:temp=0:think=off,deep"});
        json body = question("What is the capital of France?");
        body["model"] = "deep";
        const Reply whole = chat(server, body);
        REQUIRE(whole.status == 200);
        const auto refused = server.client().Post("/v1/chat/completions", {{"X-Request-Id", "mine-7"}}, "{}",
                                                  "application/json");
        CHECK(refused->status == 400);
        CHECK(refused->get_header_value("X-Request-Id") == "mine-7");
        const json& choice = whole.body["choices"][0];
        CHECK(choice["message"]["content"] == "The capital of France is Paris.");
        CHECK(choice["message"]["reasoning"] == choice["message"]["reasoning_content"]);
        CHECK(choice["finish_reason"] == "stop");
        CHECK(whole.body["model"] == "deep");

        body["stream_options"] = {{"include_usage", true}};
        const auto events = stream(server, body);
        REQUIRE(events.size() > 4);
        CHECK(events.back() == "[DONE]");
        std::string content, reasoning, finish;
        for (size_t i = 0; i + 2 < events.size(); ++i) {
            const json e = json::parse(events[i]);
            CHECK(e["usage"].is_null());
            const json& c = e["choices"][0];
            if (i == 0) CHECK(c["delta"] == json{{"role", "assistant"}, {"content", ""}});
            content += c["delta"].value("content", "");
            reasoning += c["delta"].value("reasoning_content", "");
            if (c["finish_reason"].is_string()) finish = c["finish_reason"];
        }
        CHECK(content == choice["message"]["content"]);
        CHECK(reasoning == choice["message"]["reasoning"]);
        CHECK(finish == "stop");
        const json usage = json::parse(events[events.size() - 2])["usage"];
        CHECK(usage["completion_tokens"] == whole.body["usage"]["completion_tokens"]);
        CHECK(usage["prompt_tokens_details"]["cached_tokens"] == 0);  // fewer than 64 tokens are not kept

        body["messages"].push_back({{"role", "assistant"}, {"content", content}});
        body["messages"].push_back({{"role", "user"}, {"content", "And of Italy?"}});
        const Reply next = chat(server, body);
        CHECK(next.body["choices"][0]["message"]["content"] == "The capital of Italy is Rome.");

        body["model"] = "fast";
        body["n"] = 3;
        const Reply three = chat(server, body);
        REQUIRE(three.body["choices"].size() == 3);
        for (const json& c : three.body["choices"]) {
            CHECK(c["message"]["content"] == three.body["choices"][0]["message"]["content"]);
            CHECK_FALSE(c["message"].contains("reasoning"));
        }
        auto c = server.client();
        CHECK(json::parse(c.Get("/v1/models")->body)["data"][1]["id"] == "deep");
        CHECK(c.Get("/v1/models/fast")->status == 200);
        const auto page = c.Get("/"), again = c.Get("/");
        CHECK(page->get_header_value("Content-Type") == "text/html; charset=utf-8");
        CHECK(page->get_header_value("Content-Security-Policy").find("default-src 'none'") == 0);
        CHECK(page->body.find("NONCE") == std::string::npos);
        CHECK(page->body != again->body);
        const size_t end = page->body.find("/main.js"), begin = page->body.rfind("page/", end);
        REQUIRE(begin != std::string::npos);
        const std::string folder = "/" + page->body.substr(begin, end - begin);
        c.set_decompress(false);
        for (const char* name :
             {"/main.js", "/lib/marked.js", "/lib/purify.js", "/lib/highlight.js", "/lib/katex.js"}) {
            const auto file = c.Get(folder + name);
            REQUIRE(file);
            CHECK(file->status == 200);
            CHECK(file->get_header_value("Content-Encoding") == "gzip");
            CHECK(file->get_header_value("Content-Type") == "text/javascript; charset=utf-8");
            CHECK(file->get_header_value("X-Content-Type-Options") == "nosniff");
            CHECK(file->get_header_value("Cache-Control").find("immutable") != std::string::npos);
            CHECK(file->body.size() > 1000);
        }
        CHECK(c.Get(folder + "/lib/fonts/KaTeX_Main-Regular.woff2")->body.substr(0, 4) == "wOF2");
        CHECK(c.Get(folder + "/none.js")->status == 404);
        CHECK(c.Get("/page/0/main.js")->status == 404);
        CHECK(c.Get("/page/")->status == 404);
        CHECK(c.Get("/v1/models/slow")->status == 404);
    }

    TEST_CASE("serve: --no-webui leaves out the page and its files") {
        const ServerProcess server({"--no-webui"});
        auto c = server.client();
        CHECK(c.Get("/")->status == 404);
        CHECK(c.Get("/page/0/main.js")->status == 404);
        CHECK(c.Get("/health")->status == 200);
    }

    TEST_CASE("serve: tools, schemas, stops, budgets, logprobs") {
        const ServerProcess server;
        json body = question("What is the weather in Paris?");
        body["tools"] = json::array({kWeather});
        Reply r = chat(server, body);
        REQUIRE(r.status == 200);
        json choice = r.body["choices"][0];
        CHECK(choice["finish_reason"] == "tool_calls");
        CHECK(choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather");
        CHECK(json::parse(
                  choice["message"]["tool_calls"][0]["function"]["arguments"].get<std::string>())["city"] ==
              "Paris");
        std::string name, arguments;
        for (const std::string& e : stream(server, body)) {
            if (e == "[DONE]") continue;
            const json delta = json::parse(e)["choices"][0]["delta"];
            if (!delta.contains("tool_calls")) continue;
            const json& f = delta["tool_calls"][0]["function"];
            name += f.value("name", "");
            arguments += f["arguments"].get<std::string>();
        }
        CHECK(name == "get_weather");
        CHECK(json::parse(arguments) == json{{"city", "Paris"}});

        body = question("Hello");
        body["tools"] = {kWeather, kTime};
        for (const char* effort : {"none", "high"}) {
            body["reasoning_effort"] = effort;
            body["tool_choice"] = "required";
            r = chat(server, body);
            REQUIRE(r.status == 200);
            const std::string called = r.body["choices"][0]["message"]["tool_calls"][0]["function"]["name"];
            CHECK((called == "get_weather" || called == "get_time"));
            body["tool_choice"] = {{"type", "function"}, {"function", {{"name", "get_time"}}}};
            r = chat(server, body);
            CHECK(r.body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_time");
        }
        body["tool_choice"] = "none";
        CHECK_FALSE(chat(server, body).body["choices"][0]["message"].contains("tool_calls"));

        body = question("What is 48 + 37?");
        body["response_format"] = {
            {"type", "json_schema"},
            {"json_schema",
             {{"name", "sum"},
              {"schema",
               {{"type", "object"},
                {"properties", {{"sum", {{"type", "integer"}}}, {"ok", {{"type", "boolean"}}}}},
                {"required", {"sum", "ok"}}}}}}};
        for (const char* effort : {"none", "high"}) {
            body["reasoning_effort"] = effort;
            r = chat(server, body);
            REQUIRE(r.status == 200);
            const json document = json::parse(r.body["choices"][0]["message"]["content"].get<std::string>());
            CHECK(document["sum"].is_number_integer());
            CHECK(document["ok"].is_boolean());
            CHECK(r.body["choices"][0]["finish_reason"] == "stop");
        }
        body = question("What is 48 + 37?");
        body["stop"] = {"37 ="};
        r = chat(server, body);  // its thinking says "37 =" too
        CHECK(r.body["choices"][0]["message"]["content"] == "48 + ");
        CHECK(r.body["choices"][0]["message"]["reasoning"].get<std::string>().find("37 = 85") !=
              std::string::npos);
        body["thinking_budget"] = 4;
        r = chat(server, body);
        CHECK(r.body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4);
        body = question("What is 48 + 37?");
        body["logprobs"] = true;
        body["top_logprobs"] = 2;
        r = chat(server, body);
        std::string text;
        for (const json& t : r.body["choices"][0]["logprobs"]["content"]) {
            text += t["token"];
            CHECK(t["top_logprobs"][0]["token"] == t["token"]);  // greedy
            CHECK(t["logprob"] <= 0);
        }
        CHECK(text.find(r.body["choices"][0]["message"]["content"].get<std::string>()) != std::string::npos);
        body["max_tokens"] = 3;
        CHECK(chat(server, body).body["choices"][0]["finish_reason"] == "length");

        const Reply plain = post(
            server, "/v1/completions",
            {{"prompt", "The capital of France"}, {"max_tokens", 2}, {"temperature", 0}, {"echo", true}});
        CHECK(plain.body["choices"][0]["text"] == "The capital of France is Paris");
        const Reply ids = post(server, "/tokenize", {{"content", "<|im_end|> hello"}});
        CHECK(post(server, "/detokenize", {{"tokens", ids.body["tokens"]}}).body["content"] ==
              "<|im_end|> hello");
        CHECK(post(server, "/apply-template", question("Hi"))
                  .body["prompt"]
                  .get<std::string>()
                  .find("user\nHi<|im_end|>") != std::string::npos);
    }

    TEST_CASE("serve: the protocol's odd corners get a proper answer") {
        const ServerProcess server;
        const std::string post = "POST /v1/chat/completions HTTP/1.1\r\n", host = "Host: localhost\r\n";
        const auto status = [&](const std::string& request) {
            Raw raw(server.port());
            raw.send(request);
            const std::string reply = raw.receive();
            return reply.size() > 12 ? std::atoi(reply.c_str() + 9) : 0;
        };
        CHECK(status(post + host + "Transfer-Encoding: chunked\r\n\r\n-2\r\nabc\r\n") == 400);
        CHECK(status(post + host + "\r\n{}") == 411);
        CHECK(status(post + host + "Content-Length: 99999999999\r\n\r\n") == 413);
        CHECK(status(post + host + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}") == 400);
        CHECK(status(post + host + "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}") == 415);
        CHECK(status("GET /v1/models HTTP/1.1\r\n\r\n") == 400);
        CHECK(status("GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n") == 400);
        CHECK(status("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n") == 403);
        CHECK(status("GET /v1/models HTTP/1.1\r\n" + host + "Origin: http://evil.example\r\n\r\n") == 403);
        CHECK(status("GET /nowhere HTTP/1.1\r\n" + host + "\r\n") == 404);
        CHECK(status("DELETE /v1/models HTTP/1.1\r\n" + host + "\r\n") == 405);
        CHECK(status("GET /" + std::string(20000, 'a') + " HTTP/1.1\r\n" + host + "\r\n") == 414);
        CHECK(status(std::string("\x16\x03\x01\x02\x00\x01", 6) + "\r\n\r\n") == 400);
        {
            Raw old(server.port());  // told that the connection ends, and it does
            old.send("GET /health\r\n");
            const auto begun = std::chrono::steady_clock::now();
            while (!old.receive().empty()) {
            }
            CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5));
        }
        CHECK(status(post + host + "Content-Length: 99999999999999999999999\r\n\r\n") == 400);
        std::string wide = "GET /health HTTP/1.1\r\n" + host;
        for (int i = 0; i < 40; ++i)
            wide += "X-" + std::to_string(i) + ": " + std::string(1000, 'y') + "\r\n";
        CHECK(status(wide + "\r\n") == 431);
        std::string flood;
        for (int i = 0; i < 5000; ++i) flood += "X-" + std::to_string(i) + ": y\r\n";
        CHECK(status("GET /health HTTP/1.1\r\n" + host + flood + "\r\n") == 431);

        for (const char* path : {"/v1/embeddings", "/slots/0?action=save"})
            CHECK(status(http(path, "{}")) == 404);

        std::vector<std::unique_ptr<Raw>> idle;
        for (int i = 0; i < 300; ++i) idle.push_back(std::make_unique<Raw>(server.port()));
        for (auto& raw : idle) raw->send("GET /heal");
        CHECK(status("GET /health HTTP/1.1\r\n" + host + "\r\n") == 200);
    }

    TEST_CASE("serve: keys, and who may be reached without one") {
        const ServerProcess server({"--api-key", "secret,other"});
        auto c = server.client();
        CHECK(c.Get("/health")->status == 200);
        for (const char* path : {"/v1/models", "/metrics", "/props", "/slots"})
            CHECK(c.Get(path)->status == 401);
        for (const char* key : {"Bearer secre", "Bearer secrets", "secret", "Bearer", "Basic secret"})
            CHECK(c.Get("/v1/models", {{"Authorization", key}})->status == 401);
        CHECK(c.Get("/v1/models", {{"Authorization", "Bearer secret"}})->status == 200);
        const json props = json::parse(c.Get("/props", {{"x-api-key", "secret"}})->body);
        CHECK(props["batch_invariant"] == true);
        CHECK(props["batch_invariant_over"].size() == 4);
        CHECK(c.Get("/v1/models", {{"x-api-key", "other"}})->status == 200);
        const std::string command = std::string(QUERN_BINARY) + " serve --host 0.0.0.0 --port 0 2>/dev/null";
        CHECK(WEXITSTATUS(std::system(command.c_str())) == 2);
        const std::string taken =
            std::string(QUERN_BINARY) + " serve --port " + std::to_string(server.port()) + " 2>/dev/null";
        CHECK(WEXITSTATUS(std::system(taken.c_str())) == 7);
    }

    TEST_CASE("serve: a client that leaves frees its place in every phase; a full queue says so") {
        const ServerProcess server({"-np", "1", "--queue", "1"});
        json endless = question("Tell me a story.");
        endless["ignore_eos"] = true;
        endless["stream"] = true;
        {
            Raw decoding(server.port());
            decoding.send(http("/v1/chat/completions", endless.dump()));
            CHECK(decoding.receive().find("200 OK") != std::string::npos);
            CHECK(server.reaches("quern_requests_running", 1));
            {
                Raw waiting(server.port());
                waiting.send(http("/v1/chat/completions", endless.dump()));
                CHECK(server.reaches("quern_requests_queued", 1));
                auto c = server.client();
                const auto full = c.Post("/v1/chat/completions", endless.dump(), "application/json");
                CHECK(full->status == 429);
                CHECK(full->has_header("Retry-After"));
            }
            CHECK(server.reaches("quern_requests_queued", 0));
        }
        CHECK(server.reaches("quern_requests_running", 0));
        endless["stream"] = false;
        {
            Raw silent(server.port());
            silent.send(http("/v1/chat/completions", endless.dump()));
            CHECK(server.reaches("quern_requests_running", 1));
        }
        CHECK(server.reaches("quern_requests_running", 0));
        CHECK(server.metric("quern_cancelled_total{phase=\"decode\"}") +
                  server.metric("quern_cancelled_total{phase=\"prefill\"}") ==
              2);
        CHECK(server.metric("quern_cancelled_total{phase=\"queued\"}") == 1);
        CHECK(chat(server, question("What is 2 + 2?")).status == 200);
    }

    TEST_CASE("serve: states of the prefix cache survive a restart") {
        test::TempDir directory;
        const std::vector<std::string> flags = {"--cache-dir", directory.str() + "/states"};
        json body = question("What is 12 + 7? " + std::string(400, 'x'));
        body["max_tokens"] = 40;
        const auto follow_up = [&](const ServerProcess& server) {
            json longer = body;
            longer["messages"].push_back({{"role", "assistant"}, {"content", "12 + 7 = 19."}});
            longer["messages"].push_back({{"role", "user"}, {"content", "And 12 + 8?"}});
            return chat(server, longer).body;
        };
        const auto cached = [](const json& answer) {
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
        };
        json cold;
        {
            ServerProcess server;
            cold = follow_up(server);
            CHECK(cached(cold) == 0);
        }
        {
            ServerProcess server(flags);
            CHECK(chat(server, body).status == 200);
            server.signal(SIGTERM);
            CHECK(server.wait() == 0);
        }
        {
            ServerProcess server(flags);
            const json warm = follow_up(server);
            CHECK(cached(warm) > 100);
            CHECK(warm["choices"] == cold["choices"]);
        }
        for (const auto& file : std::filesystem::directory_iterator(directory.str() + "/states"))
            std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
        ServerProcess server(flags);
        CHECK(follow_up(server)["choices"] == cold["choices"]);
    }

    TEST_CASE("serve: random weights answer with text, and the bench can load them") {
        const ServerProcess server({"--synthetic", "tiny", "--mix", "xs", "-np", "4", "-c", "1024"});
        json ids = {{"prompt", {1, 2, 3}}, {"max_tokens", 5}, {"ignore_eos", true}};
        const Reply completion = post(server, "/v1/completions", ids);
        CHECK(completion.status == 200);
        CHECK(completion.body["usage"]["completion_tokens"] == 5);

        const std::string url = "http://127.0.0.1:" + std::to_string(server.port());
        ServeLoad load{.server = {url, ""}};
        load.concurrency = {1, 6};
        load.prompt_words = 20;
        load.answer_tokens = 16;
        const auto rows = measure_server(load);
        REQUIRE(rows.size() == 2);
        for (const json& row : rows) {
            CHECK(row["failed"] == 0);
            CHECK(row["total_output_tokens"] == 16 * row["completed"].get<int64_t>());
            CHECK(row["median_ttft_ms"] > 0.0);
        }
        const std::string command =
            fmt::format("{} bench --serve {} -np 1 -p 2 -n 3 --requests 2 -o json", QUERN_BINARY, url);
        std::FILE* pipe = popen(command.c_str(), "r");
        REQUIRE(pipe != nullptr);
        std::string text;
        for (char piece[4096]; std::fgets(piece, sizeof piece, pipe) != nullptr;) text += piece;
        CHECK(pclose(pipe) == 0);
        const json one = json::parse(text);
        REQUIRE(one.size() == 1);
        CHECK(one[0]["completed"] == 2);
    }

    TEST_CASE("serve: SIGTERM lets answers end, a second one does not") {
        json longer = question("Tell me a story.");
        longer["ignore_eos"] = true;
        longer["max_tokens"] = 300;
        {
            ServerProcess server({"--drain-timeout", "600"});  // sanitizers are slow
            int status = 0;
            std::thread asking([&] { status = chat(server, longer).status; });
            CHECK(server.reaches("quern_requests_running", 1));
            server.signal(SIGTERM);
            CHECK(server.wait() == 0);
            asking.join();
            CHECK(status == 200);
        }
        longer["max_tokens"] = 100000;
        ServerProcess server({"--drain-timeout", "1000"});
        Raw raw(server.port());
        raw.send(http("/v1/chat/completions", longer.dump()));
        CHECK(server.reaches("quern_requests_running", 1));
        server.signal(SIGTERM);
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        server.signal(SIGTERM);
        CHECK(server.wait() == 143);
    }
}

}  // namespace
}  // namespace quern
