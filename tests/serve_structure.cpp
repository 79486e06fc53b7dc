// Fields that say what form an answer must have, on the real server with the demo checkpoint.
#include "serve_client.h"

namespace quern {
namespace {

using namespace test;

const json kSum = {
    {"type", "object"},
    {"properties",
     {{"sum", {{"type", "integer"}, {"minimum", 3}, {"multipleOf", 5}, {"not", {{"const", 4}}}}}}},
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

    TEST_CASE("serve: an answer whose form was asked for does not end while it thinks") {
        const ServerProcess server;
        json body = question("What is 48 + 37?");
        body["enable_thinking"] = true;
        body["logit_bias"] = {{"3000", 30}};  // the end of a turn, at every place
        body["max_tokens"] = 200;
        json choice = post(server, "/v1/chat/completions", body).body["choices"][0];
        CHECK(choice["finish_reason"] == "stop");  // it may, if nothing was asked for
        CHECK(choice["message"]["content"] == "");
        for (const json& form : {json{{"guided_choice", {"rather not", "perhaps"}}},
                                 json{{"json_schema", kSum}}, json{{"guided_regex", "[0-9]{3}"}}}) {
            body.update(form);
            choice = post(server, "/v1/chat/completions", body).body["choices"][0];
            const std::string content = choice["message"]["content"];
            CAPTURE(content);
            CHECK(choice["finish_reason"] == "stop");
            CHECK(content.size() >= 3);
            for (const auto& [field, value] : form.items()) body.erase(field);
        }
    }

    TEST_CASE(
        "serve: demanded calls are whole: offered names, required parameters, their types, and nothing "
        "else") {
        const ServerProcess server;
        const auto tool = [](const char* name, const json& parameters) {
            return json{{"type", "function"}, {"function", {{"name", name}, {"parameters", parameters}}}};
        };
        const json integer = {{"type", "integer"}};
        const json sum = {{"type", "object"}, {"properties", {{"sum", integer}}}, {"required", {"sum"}}};
        const json pair = {{"type", "object"},
                           {"properties", {{"ok", {{"type", "boolean"}}}, {"unit", {{"enum", {"m", "km"}}}}}},
                           {"required", {"unit", "ok"}}};
        json body = question("What is 48 + 37?");
        body["tools"] = {tool("S", sum), tool("P", pair)};
        body["max_tokens"] = 300;
        const json named = {{"type", "function"}, {"function", {{"name", "S"}}}};
        const json only = {{"type", "allowed_tools"},
                           {"allowed_tools", {{"mode", "required"}, {"tools", {tool("P", pair)}}}}};
        for (const bool thinking : {false, true})
            for (const double temperature : {0.0, 1.5})
                for (const json& choice : {json("required"), named, only}) {
                    body["enable_thinking"] = thinking;
                    body["thinking_budget"] = 40;
                    body["temperature"] = temperature;
                    body["seed"] = 3;
                    body["tool_choice"] = choice;
                    body["parallel_tool_calls"] = false;
                    const Reply r = chat(server, body);
                    CAPTURE(r.body.dump());
                    REQUIRE(r.status == 200);
                    const json& answer = r.body["choices"][0];
                    CHECK(answer["finish_reason"] == "tool_calls");
                    CHECK((answer["message"]["content"].is_null() || answer["message"]["content"] == ""));
                    REQUIRE(answer["message"]["tool_calls"].size() == 1);
                    const json& function = answer["message"]["tool_calls"][0]["function"];
                    const json arguments = json::parse(function["arguments"].get<std::string>());
                    if (choice == named) CHECK(function["name"] == "S");
                    if (choice == only) CHECK(function["name"] == "P");
                    if (function["name"] == "S") {
                        CHECK(arguments.size() == 1);
                        CHECK(arguments["sum"].is_number_integer());
                    } else {
                        CHECK(function["name"] == "P");
                        CHECK(arguments.size() == 2);
                        CHECK(arguments["ok"].is_boolean());
                        CHECK((arguments["unit"] == "m" || arguments["unit"] == "km"));
                    }
                }
        body = {{"messages", body["messages"]},
                {"max_tokens", 300},
                {"tools", {{{"name", "S"}, {"input_schema", sum}}}},
                {"tool_choice", {{"type", "any"}, {"disable_parallel_tool_use", true}}}};
        for (const json& choice : {json{{"type", "any"}}, json{{"type", "tool"}, {"name", "S"}}}) {
            body["tool_choice"] = choice;
            const Reply r = post(server, "/v1/messages", body);
            CHECK(r.body["stop_reason"] == "tool_use");
            CHECK(r.body["content"][0]["input"]["sum"].is_number_integer());
        }
        body["tool_choice"] = {{"type", "none"}};
        CHECK(post(server, "/v1/messages", body).body["stop_reason"] != "tool_use");
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
        CHECK(reply->get_header_value("X-Not-Enforced").find("$.properties.sum.not") != std::string::npos);
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
        refused({{"regex", "(?=a)"}}, "regex");
        refused({{"structured_outputs", {{"grammar", "x"}}}}, "structured_outputs.grammar");
        refused({{"structured_outputs", {{"structural_tag", "x"}}}}, "structured_outputs.structural_tag");
        refused({{"response_format", {{"type", "json_schema"}}}}, "response_format.json_schema.schema");
    }
}

}  // namespace
}  // namespace quern
