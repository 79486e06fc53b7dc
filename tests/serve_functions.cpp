// Functions, as chat requests had them before tools, on the real server with the demo checkpoint.
#include "serve_client.h"
#include "tools/serve/chat_body.h"

namespace quern {
namespace {

using namespace test;

const char* kFunction =
    R"({"name":"get_weather","description":"The weather of a city","parameters":{"type":"object",
    "properties":{"city":{"type":"string"}},"required":["city"]}})";

json asked() {
    json body = question("What is the weather in Paris?");
    body["functions"] = json::array({json::parse(kFunction)});
    return body;
}

TEST_SUITE("cpu") {
    TEST_CASE("functions: requests are those of tools") {
        json body = asked();
        body["function_call"] = {{"name", "get_weather"}};
        body["messages"].push_back(
            {{"role", "assistant"},
             {"content", nullptr},
             {"function_call", {{"name", "get_weather"}, {"arguments", R"({"city":"Paris"})"}}}});
        body["messages"].push_back({{"role", "function"}, {"name", "get_weather"}, {"content", "rain"}});
        const ChatBody chat = chat_body(body);
        CHECK(chat.kinds.legacy);
        CHECK(chat.body["tools"] ==
              json::parse(std::string(R"([{"type":"function","function":)") + kFunction + "}]"));
        CHECK(chat.body["tool_choice"] ==
              json::parse(R"({"type":"function","function":{"name":"get_weather"}})"));
        CHECK(!chat.body.contains("functions"));
        CHECK(!chat.body.contains("function_call"));
        const json call = chat.body["messages"][1]["tool_calls"][0];
        CHECK(call["function"]["arguments"] == R"({"city":"Paris"})");
        CHECK(chat.body["messages"][2]["role"] == "tool");
        CHECK(chat.body["messages"][2]["tool_call_id"] == call["id"]);
        CHECK(!chat_body(question("x")).kinds.legacy);
    }

    TEST_CASE("serve: a request with functions gets its answer as a function_call") {
        const ServerProcess server;
        json body = asked();
        const auto post = [&](const json& request) {
            const Reply reply = chat(server, request);
            REQUIRE(reply.status == 200);
            return reply.body["choices"][0];
        };
        const json choice = post(body);
        CHECK(choice["finish_reason"] == "function_call");
        CHECK(choice["message"]["function_call"]["name"] == "get_weather");
        CHECK(json::parse(choice["message"]["function_call"]["arguments"].get<std::string>()) ==
              json{{"city", "Paris"}});
        CHECK(!choice["message"].contains("tool_calls"));

        std::string name, arguments, finish;
        for (const std::string& event : stream(server, body)) {
            const json e = json::parse(event, nullptr, false);
            if (!e.is_object() || e["choices"].empty()) continue;
            const json& delta = e["choices"][0]["delta"];
            CHECK(!delta.contains("tool_calls"));
            if (delta.contains("function_call")) {
                name += delta["function_call"].value("name", "");
                arguments += delta["function_call"]["arguments"];
            }
            if (e["choices"][0]["finish_reason"].is_string()) finish = e["choices"][0]["finish_reason"];
        }
        CHECK(name == "get_weather");
        CHECK(arguments == choice["message"]["function_call"]["arguments"]);
        CHECK(finish == "function_call");

        body["messages"].push_back(choice["message"]);
        body["messages"].push_back({{"role", "function"},
                                    {"name", "get_weather"},
                                    {"content", R"({"temp_c": 17, "sky": "rainy"})"}});
        const json answer = post(body);
        CHECK(answer["finish_reason"] == "stop");
        CHECK(answer["message"]["content"] == "In Paris it is 17°C and rainy.");
        body["function_call"] = "none";
        CHECK(!post(body)["message"].contains("function_call"));
    }
}

}  // namespace
}  // namespace quern
