// bench --serve and bench --suite: other prompts in every run, traces that grow as agents' histories do, one table of everything.
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "checkpoint_writer.h"
#include "ggml-like/error.h"
#include "server_process.h"
#include "tools/bench/serve_load.h"
#include "tools/bench/suite.h"
#include "tools/common/html.h"

namespace quern {
namespace {

using json = nlohmann::ordered_json;

std::string url_of(const ServerProcess& server) {
    return "http://127.0.0.1:" + std::to_string(server.port());
}

size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
}

TEST_SUITE("cpu") {
    TEST_CASE("bench --serve: another run sends other prompts, the same seed the same ones") {
        const ServerProcess server({"--synthetic", "tiny", "-np", "4", "-c", "1024"});
        ServeLoad load{.server = {url_of(server), ""}, .concurrency = {2}, .requests = 6, .seed = 1};
        load.prompt_words = 150;
        load.answer_tokens = 4;
        CHECK(measure_server(load)[0]["cached_tokens"] == 0);
        load.seed = 2;
        CHECK(measure_server(load)[0]["cached_tokens"] == 0);
        const json again = measure_server(load)[0];
        CHECK(again["cached_tokens"] > 0);
        CHECK(again["completed"] == 6);
        for (const char* name : {"median_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "p95_itl_ms", "p99_itl_ms"})
            CHECK(again[name] > 0.0);
        CHECK(again["median_itl_ms"] <= again["p95_itl_ms"]);
        CHECK(again["p95_itl_ms"] <= again["p99_itl_ms"]);
        CHECK_THROWS_WITH_AS(greet({"https://x", ""}), doctest::Contains("http://HOST:PORT"), Error);
        CHECK_THROWS_WITH_AS(greet({"http://127.0.0.1:1", ""}), doctest::Contains("no server is ready"),
                             Error);
    }

    TEST_CASE("traces: histories grow, what is shared is read once, blocks of the same id are the same") {
        test::TempDir directory;
        const std::string path = directory / "trace.jsonl";
        const auto write = [&](const std::string& text) { std::ofstream(path) << text; };
        write(R"({"session": "a", "shared": "agent", "shared_words": 200, "words": 60, "answer": 6}

{"session": "b", "shared": "agent", "shared_words": 200, "words": 60, "answer": 6}
{"session": "a", "words": 60, "answer": 6, "wait": 0.01}
{"session": "a", "words": 60, "answer": 6}
)");
        const Trace trace = Trace::read(path);
        REQUIRE(trace.sessions.size() == 2);
        CHECK(trace.sessions[0].size() == 3);
        const ServerProcess server({"--synthetic", "tiny", "-np", "2", "-c", "2048"});
        const ServerAddress address{url_of(server), ""};
        const json row = replay(address, trace, 1, 3);
        CHECK(row["sessions"] == 2);
        CHECK(row["completed"] == 4);
        CHECK(row["failed"] == 0);
        CHECK(row["total_output_tokens"] == 24);
        // Turns 2 and 3 of a go on from the one before; b begins with what a began with.
        CHECK(row["cached_tokens"].get<int64_t>() > row["total_input_tokens"].get<int64_t>() / 2);

        write(R"({"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [5, 6]}
{"timestamp": 300, "input_length": 600, "output_length": 3, "hash_ids": [5, 9]})");
        const json blocks = replay(address, Trace::read(path), 2, 4);
        CHECK(blocks["completed"] == 2);
        CHECK(blocks["total_input_tokens"] == 1300);
        CHECK(blocks["total_output_tokens"] == 6);
        CHECK(server_table(json::array({row, blocks})).find("p50 / p95 / p99") != std::string::npos);

        const auto refused = [&](const std::string& text, const char* why) {
            write(text);
            CHECK_THROWS_WITH_AS(Trace::read(path), doctest::Contains(why), Error);
        };
        refused("{\"session\": \"a\"}\n{oops", "line 2");
        refused("{}", "session must be a text");
        refused("{\"session\": \"a\", \"words\": 0}", "words must be an integer, 1 or more");
        refused("{\"session\": \"a\", \"wait\": -1}", "wait must be seconds");
        refused("{\"hash_ids\": [1]}", "input_length and output_length are missing");
        refused("\n", "no turns");
        CHECK_THROWS_AS(Trace::read(directory / "none"), Error);
    }

    TEST_CASE("hidden numbers: once in the text, and another one for another seed") {
        std::set<std::string> numbers;
        for (uint64_t seed = 0; seed < 20; ++seed) {
            const Hidden hidden = hidden_number(seed, 200);
            CHECK(count(hidden.text, hidden.number) == 1);
            CHECK(count(hidden.text, " ") > 200);
            numbers.insert(hidden.number);
        }
        CHECK(numbers.size() == 20);
        CHECK(prompt_kinds().size() == 6);
    }

    TEST_CASE("bench --suite: a row for everything that was asked, in each of the forms" *
              doctest::test_suite("slow")) {
        const ServerProcess server({"--synthetic", "tiny", "-np", "4", "-c", "2048", "--spec", "lookup"});
        SuitePlan plan{.people = {1, 3}, .depth_tokens = {500, 100000}, .readers = 3};
        plan.shortest_text = 300;
        plan.longest_text = 900;
        plan.answer_tokens = 12;
        plan.repetitions = 1;
        int told = 0;
        const json rows = run_suite({url_of(server), ""}, plan, [&](const json&) { ++told; });
        REQUIRE(rows.size() == 6 + 2 + 1 + 2);
        CHECK(told == 11);
        for (const json& row : rows) {
            CAPTURE(row.dump());
            if (row["name"] == "100000 tokens before") {
                CHECK(row["skipped"].get<std::string>().find("2048") != std::string::npos);
                continue;
            }
            CHECK(row["failed"] == 0);
            CHECK(row["requests"] > 0);
            CHECK(row["tokens_per_second"] > 0.0);
            CHECK(row["median_ttft_ms"] > 0.0);
        }
        CHECK(rows[8]["correct"].get<std::string>().find(" of 3") != std::string::npos);
        CHECK(rows[8]["prompt_tokens"].get<double>() == doctest::Approx(600).epsilon(0.2));
        CHECK(rows[9]["prompt_tokens"].get<double>() == doctest::Approx(500).epsilon(0.2));
        CHECK(rows[9]["follow_up_ms"] > 0.0);
        CHECK(count(suite_markdown(rows), "\n") == 11 + 2);
        CHECK(suite_markdown(rows).find("skipped: needs") != std::string::npos);
        CHECK(count(suite_csv(rows), "\n") == 11 + 1);
        const std::string picture = suite_plot(rows, "a < b");
        CHECK(count(picture, "<svg") == 1);
        CHECK(count(picture, "</svg>") == 1);
        CHECK(count(picture, html_text("a < b")) == 1);
        CHECK(count(picture, "<rect") >= 1 + 6);
        CHECK(count(picture, "<polyline") == 4);
        CHECK(picture.find("nan") == std::string::npos);
        CHECK(suite_plot(json::array(), "").find("</svg>") != std::string::npos);
    }

    TEST_CASE("bench --suite: without a server it starts one, and its report has all forms" *
              doctest::test_suite("slow")) {
        test::TempDir directory;
        const std::string command = std::string(QUERN_BINARY) +
                                    " bench --suite -ngl 0 -np 1 -d 200 -n 4 -r 1 -o csv --report " +
                                    directory.str() + " 2>/dev/null";
        std::FILE* pipe = popen(command.c_str(), "r");
        REQUIRE(pipe != nullptr);
        std::string text;
        for (char piece[4096]; std::fgets(piece, sizeof piece, pipe) != nullptr;) text += piece;
        CHECK(pclose(pipe) == 0);
        CHECK(count(text, "\n") == 6 + 1 + 1 + 1 + 1);
        for (const char* name : {"suite.md", "suite.csv", "suite.json", "suite.svg"})
            CHECK(std::ifstream(directory / name).good());
    }
}

}  // namespace
}  // namespace quern
