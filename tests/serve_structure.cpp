// Fields that say what form an answer must have, on the real server with the demo checkpoint.
#include "serve_client.h"

namespace quern {
namespace {

using namespace test;

const json kSum = {{"type", "object"},
                   {"properties", {{"sum", {{"type", "integer"}, {"minimum", 3}, {"multipleOf", 5}}}}},
                   {"required", {"sum"}}};

TEST_SUITE("model") {
    TEST_CASE("serve: structured output by every field that asks for it") {
        const ServerProcess server;
        json plain = question("What is 48 + 37?");
        plain["enable_thinking"] = false;
        plain["max_tokens"] = 100;
        const auto content = [&](const json& change, const char* path = "/v1/chat/completions") {
            json body = plain;
            body.update(change);
            const Reply r = post(server, path, body);
            CAPTURE(body.dump());
            CAPTURE(r.body.dump());
            REQUIRE(r.status == 200);
            return r.body;
        };
        for (const json& change :
             {json{{"json_schema", kSum}}, json{{"guided_json", kSum}}, json{{"guided_json", kSum.dump()}},
              json{{"structured_outputs", {{"json", kSum}, {"choice", nullptr}}}},
              json{{"response_format", {{"type", "json_object"}, {"schema", kSum}}}},
              json{{"response_format", {{"type", "json_schema"}, {"json_schema", {{"schema", kSum}}}}}}}) {
            const json answer = content(change)["choices"][0];
            CHECK(json::parse(answer["message"]["content"].get<std::string>())["sum"].is_number_integer());
            CHECK(answer["finish_reason"] == "stop");
        }
        for (const json& change :
             {json{{"choice", {"rather not", "perhaps"}}}, json{{"guided_choice", {"rather not", "perhaps"}}},
              json{{"structured_outputs", {{"choice", {"rather not", "perhaps"}}}}}}) {
            const std::string text = content(change)["choices"][0]["message"]["content"];
            CHECK((text == "rather not" || text == "perhaps"));
        }
        const json message = content(
            {{"output_config", {{"format", {{"type", "json_schema"}, {"schema", kSum}}}}}}, "/v1/messages");
        CHECK(json::parse(message["content"][0]["text"].get<std::string>())["sum"].is_number_integer());
        CHECK(content({{"guided_json", ""},
                       {"structured_outputs", {{"json_object", false}}}})["choices"][0]["message"]["content"]
                  .get<std::string>()
                  .find('{') == std::string::npos);
    }

    TEST_CASE("serve: what of a schema is not enforced is said, what is wrong is refused") {
        const ServerProcess server;
        json body = question("What is 48 + 37?");
        body["max_tokens"] = 40;
        body["json_schema"] = kSum;
        auto c = server.client();
        const auto reply = c.Post("/v1/chat/completions", body.dump(), "application/json");
        REQUIRE(reply);
        CHECK(reply->status == 200);
        CHECK(reply->get_header_value("X-Not-Enforced").find("$.properties.sum.multipleOf") !=
              std::string::npos);
        body["stream"] = true;
        CHECK(c.Post("/v1/chat/completions", body.dump(), "application/json")->has_header("X-Not-Enforced"));
        body.erase("json_schema");
        CHECK_FALSE(
            c.Post("/v1/chat/completions", body.dump(), "application/json")->has_header("X-Not-Enforced"));
        body["stream"] = false;
        const auto refused = [&](const json& change, const std::string& param) {
            json wrong = body;
            wrong.update(change);
            const Reply r = chat(server, wrong);
            CAPTURE(wrong.dump());
            CHECK(r.status == 400);
            CHECK(r.body["error"]["param"] == param);
        };
        refused({{"json_schema", kSum}, {"choice", {"a"}}}, "choice");
        refused({{"json_schema", {{"type", "text"}}}}, "json_schema");
        refused({{"guided_json", "{"}}, "guided_json");
        refused({{"choice", json::array()}}, "choice");
        refused({{"choice", "a"}}, "choice");
        refused({{"structured_outputs", {{"structural_tag", "x"}}}}, "structured_outputs.structural_tag");
        refused({{"response_format", {{"type", "json_schema"}}}}, "response_format.json_schema.schema");
    }
}

}  // namespace
}  // namespace quern
