// Fields of llama.cpp's API and limits of one client, on the real server with the demo checkpoint.
#include <atomic>
#include <memory>
#include <thread>

#include "models/model.h"
#include "serve_client.h"
#include "tools/serve/metrics.h"

namespace quern {
namespace {

using namespace test;

json parsed(const std::string& event) { return json::parse(event, nullptr, false); }

TEST_SUITE("model") {
    TEST_CASE("serve: progress of the prompt and timings with every chunk, where asked for") {
        const ServerProcess server({"-ub", "16"});  // 64: prompts are cut at multiples of that
        std::string text = "What is the capital of France?";
        for (int i = 0; i < 20; ++i) text += " Think of the rivers and of the hills before you answer.";
        json body = question(text);
        body["max_tokens"] = 12;
        body["ignore_eos"] = true;
        body["return_progress"] = body["timings_per_token"] = true;
        for (const char* path : {"/v1/chat/completions", "/v1/completions"}) {
            CAPTURE(path);
            body["prompt"] = text;
            int64_t done = -1, total = 0, tokens = 0;
            int steps = 0;
            for (const std::string& event : stream(server, body, path)) {
                const json j = parsed(event);
                if (!j.is_object()) continue;
                if (j.contains("prompt_progress")) {
                    const json& p = j["prompt_progress"];
                    CHECK(tokens == 0);
                    CHECK(p["processed"].get<int64_t>() > done);
                    CHECK(p["cache"] == 0);
                    CHECK(p["time_ms"] >= 0);
                    done = p["processed"];
                    total = p["total"];
                    CHECK((done % 64 == 0 || done == total));
                    ++steps;
                } else if (j.contains("timings")) {
                    const json& t = j["timings"];
                    CHECK(t["prompt_n"] == total);
                    CHECK(t["predicted_n"].get<int64_t>() >= tokens);
                    tokens = t["predicted_n"];
                } else {
                    CHECK(tokens == 0);  // the role
                }
            }
            CHECK(steps > 2);
            CHECK(done == total);
            CHECK(tokens == 12);
        }
    }

    TEST_CASE("serve: cache_prompt false neither uses kept states nor leaves any") {
        const ServerProcess server;
        json body =
            question("What is the capital of France? " + std::string(100, 'x'));  // more than 64 tokens
        body["max_tokens"] = 4;
        body["cache_prompt"] = false;
        body["id_slot"] = 1;
        const auto cached = [&](const json& request) {
            const Reply r = chat(server, request);
            REQUIRE(r.status == 200);
            return r.body["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
        };
        CHECK(cached(body) == 0);
        CHECK(server.metric("quern_cache_snapshots") == 0);
        json with = body;
        with["cache_prompt"] = true;
        CHECK(cached(with) == 0);
        CHECK(cached(with) > 0);
        CHECK(cached(body) == 0);
        body["id_slot"] = "1";
        CHECK(chat(server, body).status == 400);
    }

    TEST_CASE("serve: drafts change no answer, are counted, and may be left out by a request") {
        const ServerProcess plain, server({"--spec", "lookup", "--draft-max", "5"});
        json body = question("What is the capital of France?");
        const std::string sentence = "The capital of France is Paris, and it is a large city by the river.";
        body["messages"].push_back({{"role", "assistant"}, {"content", sentence}});
        body["messages"].push_back(body["messages"][0]);
        body["max_tokens"] = 60;
        body["ignore_eos"] = true;
        for (const double temperature : {0.0, 1.0}) {
            body["temperature"] = temperature;
            body["seed"] = 7;
            const json expected = chat(plain, body).body, found = chat(server, body).body;
            CHECK(found["choices"] == expected["choices"]);
            CHECK(!expected["timings"].contains("draft_n"));
            if (temperature > 0) continue;
            const json& t = found["timings"];
            REQUIRE(t.contains("draft_n"));
            CHECK(t["draft_n"] > 0);
            const json& usage = found["usage"]["completion_tokens_details"];
            CHECK(usage["accepted_prediction_tokens"] == t["draft_n_accepted"]);
            CHECK(usage["accepted_prediction_tokens"].get<int64_t>() +
                      usage["rejected_prediction_tokens"].get<int64_t>() ==
                  t["draft_n"]);
            CHECK(server.metric("quern_draft_tokens_total") == t["draft_n"].get<double>());
            CHECK(server.metric("quern_draft_tokens_accepted_total") == t["draft_n_accepted"].get<double>());
        }
        body["temperature"] = 0;
        for (const json& none : {json{{"type", "none"}}, json{{"n", 0}}}) {
            body["speculative"] = none;
            CHECK(!chat(server, body).body["timings"].contains("draft_n"));
        }
        body["speculative"] = {{"type", "lookup"}, {"n", 2}};
        CHECK(chat(server, body).status == 200);
        CHECK(chat(plain, body).status == 400);  // it was started without
        for (const json& wrong : {json{{"type", "crystal ball"}}, json{{"n", -1}}, json{{"m", 1}}, json(3)}) {
            body["speculative"] = wrong;
            const Reply r = chat(server, body);
            CHECK(r.status == 400);
            CHECK(r.body["error"]["message"].get<std::string>().find("speculative") != std::string::npos);
        }
    }

    TEST_CASE("serve: slots and metrics say which rows of the head drafts read") {
        const ServerProcess server({"--spec", "mtp", "--draft-max", "3", "-np", "2"});
        json body = question("What is the capital of France?");
        body["max_tokens"] = 600;
        body["ignore_eos"] = true;
        std::atomic<bool> done = false;
        std::thread asking([&] {
            chat(server, body);
            done = true;
        });
        auto c = server.client();
        json slots;
        const auto said = [&](size_t slot) { return slots[slot]["speculation"].contains("draft_rows"); };
        do {
            slots = json::parse(c.Get("/slots")->body);
        } while (!done && !said(0));
        asking.join();
        REQUIRE(said(0));
        CHECK(slots[0]["speculation"]["draft_rows"] == "all");  // the demo has no short head
        CHECK(!said(1));
        CHECK(server.metric("quern_draft_passes_total{rows=\"all\"}") > 0);
        CHECK(server.metric("quern_draft_passes_total{rows=\"frequent\"}") == 0);
    }

    TEST_CASE("metrics: passes that drafted, and times of steps, by rows of the head") {
        SpeculationReport report;
        report.passes = {5, 2, 0};
        report.costs = {{1, 4, DraftRows::frequent, 0.25, true}, {1, 4, DraftRows::copied, 0.5, true}};
        Metrics metrics;
        metrics.replica(0).set_speculation(report);
        const std::string text = metrics.text(),
                          cost = "\nquern_draft_step_cost_seconds{sequences=\"1\",rows=\"4\"";
        for (const std::string& line : {std::string("\n# TYPE quern_draft_passes_total counter\n"),
                                        std::string("\nquern_draft_passes_total{rows=\"copied\"} 2\n"),
                                        cost + "} 0.25\n", cost + ",draft_rows=\"copied\"} 0.5\n"})
            CHECK(text.find(line) != std::string::npos);
    }

    TEST_CASE("serve: a client that only closed its own side of the connection still gets its stream") {
        const ServerProcess server;
        json body = question("What is 3 + 4?");
        body["stream"] = true;
        body["max_tokens"] = 200;
        body["ignore_eos"] = true;
        Raw raw(server.port());
        raw.send(http("/v1/chat/completions", body.dump(), "Connection: close\r\n"));
        std::string all, piece;
        do {  // headers may come alone
            piece = raw.receive();
            all += piece;
        } while (!piece.empty() && all.find("data: ") == std::string::npos);
        raw.end_sending();
        while (!(piece = raw.receive()).empty()) all += piece;
        CHECK(all.find("data: [DONE]") != std::string::npos);
        CHECK(server.metric("quern_cancelled_total{phase=\"decode\"}") == 0);
    }

    TEST_CASE("serve: one address has only so many connections") {
        const ServerProcess server({"--peer-connections", "4"});
        const std::string health = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
        std::vector<std::unique_ptr<Raw>> connections;
        const auto status = [&](Raw& raw) {
            raw.send(health);
            const std::string reply = raw.receive();
            return reply.size() > 12 ? std::atoi(reply.c_str() + 9) : 0;
        };
        std::this_thread::sleep_for(
            std::chrono::seconds(1));  // those that asked whether it is ready have ended
        for (int i = 0; i < 4; ++i) {
            connections.push_back(std::make_unique<Raw>(server.port()));
            CHECK(status(*connections.back()) == 200);
        }
        {
            Raw more(server.port());
            more.send("GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n");
            const std::string reply = more.receive();
            CHECK(reply.find(" 429 ") != std::string::npos);
            CHECK(reply.find("too_many_connections") != std::string::npos);
        }
        CHECK(status(*connections[0]) == 200);
        connections.pop_back();
        std::this_thread::sleep_for(std::chrono::seconds(1));
        Raw again(server.port());
        CHECK(status(again) == 200);
    }
}

}  // namespace
}  // namespace quern
