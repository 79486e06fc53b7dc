// `--doctor` of bench, run and serve: what is printed where, and exit codes.
#include <doctest/doctest.h>

#include <filesystem>

#include "checkpoint_copy.h"
#include "demo_copy.h"
#include "ggml-like/json.h"
#include "server_process.h"

using namespace quern;
using namespace quern::test;

namespace {

int quern_says(const std::string& arguments, std::string* out = nullptr) {
    std::FILE* pipe = popen((QUERN_BINARY " " + arguments + " 2>/dev/null </dev/null").c_str(), "r");
    REQUIRE(pipe != nullptr);
    char buffer[4096];
    while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe))
        if (out != nullptr) out->append(buffer, n);
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_SUITE("model") {
    TEST_CASE("doctor: bench and run print the page, or JSON, and write a picture" *
              doctest::test_suite("slow")) {
        TempDir dir;
        std::string text;
        CHECK(quern_says("bench --doctor -ngl 0 -t 2 --html " + (dir / "page.html"), &text) == 0);
        CHECK(contains(text, "of the kind quern demo"));
        CHECK(contains(text, "\nsound: "));
        CHECK(std::filesystem::file_size(dir / "page.html") > 1000);  // a slow machine skips checks
        std::string json;
        CHECK(quern_says("run --doctor --json -ngl 0 -t 2", &json) == 0);
        CHECK(nlohmann::json::parse(json).at("verdict") == "ok");
        CHECK(quern_says("bench --doctor -ngl 0 --html /nowhere/page.html") == 1);
    }

    TEST_CASE("doctor: a damaged checkpoint ends with exit code 3" * doctest::test_suite("slow")) {
        DemoCopy copy;
        copy.replace_layer(2, 1);
        copy.write();
        std::string text;
        CHECK(quern_says("bench --doctor -ngl 0 -t 2 " + copy.dir.str(), &text) == 3);
        CHECK(contains(text, "NOT SOUND"));
        CHECK(contains(text, "after layer 2 the residual stream"));
    }

    TEST_CASE("doctor: serve examines before it answers, and says so in /props" *
              doctest::test_suite("slow")) {
        ServerProcess server({"--doctor", "-ngl", "0", "-np", "2", "-c", "1024"});
        const auto r = server.client().Get("/props");
        REQUIRE(r);
        const auto doctor = nlohmann::json::parse(r->body).at("doctor");
        CHECK(doctor.at("verdict") == "ok");
        CHECK(doctor.at("checks").size() > 10);
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("doctor: flags that make no sense") {
        CHECK(quern_says("bench --json") == 2);
        CHECK(quern_says("run --html page.html -p hi") == 2);
        CHECK(quern_says("bench --doctor --synthetic tiny -ngl 0") == 2);
        CHECK(quern_says("serve --doctor --synthetic tiny -ngl 0 --port 0") == 2);
    }
}
