// The server with a packed KV cache: what it says of its format and cost, and that kept states of it are found again.
#include "serve_client.h"

namespace quern {
namespace {

using namespace test;

json props(const ServerProcess& server) {
    auto client = server.client();
    return json::parse(client.Get("/props")->body);
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("serve: with each packed KV cache the next turn is found, and /props names the format") {
        for (const char* type : {"fp8", "nvfp4", "tq4", "k8v4"}) {
            CAPTURE(std::string(type));
            const ServerProcess server({"--synthetic", "tiny", "-c", "2048", "-ctk", type});
            const json kv = props(server)["kv_cache"];
            const bool mixed = std::string(type) == "k8v4";
            CHECK(kv["type_k"] == (mixed ? "fp8" : type));
            CHECK(kv["type_v"] == (mixed ? "tq4" : type));
            CHECK(!kv.contains("kl_mean"));  // random weights predict nothing
            json body = question(std::string(400, 'x'));
            body["max_tokens"] = 4;
            const Reply first = chat(server, body);
            CHECK(first.status == 200);
            body["messages"].push_back({{"role", "assistant"}, {"content", "Yes."}});
            body["messages"].push_back({{"role", "user"}, {"content", "And?"}});
            const Reply next = chat(server, body);
            CHECK(next.body["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>() >= 64);
        }
    }

    TEST_CASE("serve: /props has the measured cost of a packed KV cache" * doctest::test_suite("slow")) {
        const json kv = props(ServerProcess({"-c", "1024", "-ctk", "fp8"}))["kv_cache"];
        CAPTURE(kv.dump());
        CHECK(kv["type_k"] == "fp8");
        CHECK(kv["kl_mean"].get<double>() > 1e-5);
        CHECK(kv["kl_mean"].get<double>() < 0.1);
        CHECK(kv["top1_agreement"].get<double>() > 0.9);
    }
}

}  // namespace quern
