// What the real server refuses, and in which words, through an HTTP client.
#include "serve_client.h"

namespace quern {
namespace {

using namespace test;

TEST_SUITE("model") {
    TEST_CASE("serve: bad requests are told what was expected and what was found") {
        const ServerProcess server;
        const auto says = [&](json change, const std::string& path = "/v1/chat/completions") {
            json body = question("Hi");
            if (path == "/v1/completions") body["prompt"] = "Hi";
            body.update(change);
            const Reply r = post(server, path, body);
            CAPTURE(body.dump());
            CHECK(r.status == 400);
            const json& error = r.body["error"];
            return (error.is_object() ? error["message"] : error).get<std::string>();
        };
        const std::string limit =
            "max_tokens must be a whole number of at least 1, or -1 for no limit, found ";
        for (const char* path : {"/v1/chat/completions", "/v1/messages"}) {
            CHECK(says({{"max_tokens", 0}}, path) == limit + "0");
            CHECK(says({{"max_tokens", -5}}, path) == limit + "-5");
            CHECK(says({{"max_tokens", "many"}}, path) == limit + "'many'");
        }
        CHECK(says({{"max_tokens", 1.5}}) == limit + "1.5");
        CHECK(says({{"max_tokens", 18446744073709551615u}}) == limit + "18446744073709551615");
        CHECK(says({{"max_tokens", -2}}, "/v1/completions") ==
              "max_tokens must be a whole number of at least 0, or -1 for no limit, found -2");
        CHECK(says({{"n", 9}}) == "n must be a whole number from 1 to 8, found 9");
        CHECK(says({{"stream", "yes"}}) == "stream must be true or false, found 'yes'");
        CHECK(says({{"model", {1, 2}}}) == "model must be a string, found a list of 2");
        CHECK(says({{"tools", json::object()}}) == "tools must be a list, found an object");
        CHECK(says({{"messages", "Hi"}}) == "messages must be a list, found 'Hi'");
        CHECK(says({{"messages", {"Hi"}}}) == "messages[0] must be a JSON object, found 'Hi'");
        CHECK(says({{"messages", {{{"role", "robot"}, {"content", "x"}}}}}) ==
              "messages[0].role must be system, developer, user, assistant or tool, found 'robot'");
        CHECK(says({{"stop", {3}}}) == "stop must be texts of 1 to 4096 bytes, found 3");
        CHECK(says({{"tool_choice", "maybe"}}).ends_with(", found 'maybe'"));
        CHECK(says({{"reasoning_effort", "huge"}}).ends_with(", found 'huge'"));
        CHECK(says({{"response_format", {{"type", "xml"}}}}) ==
              "response_format.type must be text, json_object or json_schema, found 'xml'");
        CHECK(says({{"guided_choice", {"a", 1}}}) == "guided_choice must be a list of texts, found 1 in it");
        CHECK(says({{"prompt", {-1}}}, "/v1/completions").ends_with(", found -1"));
        CHECK(says({{"tokens", {"x"}}}, "/detokenize").ends_with(", found 'x'"));
        CHECK(says({{"tool_choice", {{"type", "all"}}}}, "/v1/messages").ends_with(", found 'all'"));
        CHECK(says({{"format", 3}}, "/api/chat") == "format must be \"json\" or a JSON schema, found 3");
        CHECK(says({{"input", 3}}, "/v1/responses") == "input must be a text or a list of items, found 3");
        CHECK(says({{"input", "x"}, {"max_output_tokens", 0}}, "/v1/responses")
                  .starts_with("max_output_tokens must"));
        CHECK(says({{"stop_sequences", {3}}}, "/v1/messages").starts_with("stop_sequences must"));
        CHECK(says({{"options", {{"top_p", 2}}}}, "/api/chat").starts_with("options.top_p: "));
        CHECK(says({{"think", "huge"}}, "/api/chat").starts_with("think must be"));
        CHECK(says({{"stream", std::string(5000, 'x')}}).size() < 200);  // what was found is shortened
    }

    TEST_CASE("serve: a message of a user without content is refused, one that only calls tools is not") {
        const ServerProcess server;
        const json call = {
            {"id", "a"}, {"type", "function"}, {"function", {{"name", "get_time"}, {"arguments", "{}"}}}};
        const json hi = {{"role", "user"}, {"content", "Hi"}};
        for (const json& silent : {json{{"role", "user"}}, json{{"role", "user"}, {"content", nullptr}}}) {
            for (const char* path : {"/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"}) {
                CAPTURE(path);
                const bool items = std::string(path) == "/v1/responses";
                const Reply r =
                    post(server, path, {{items ? "input" : "messages", {hi, silent}}, {"max_tokens", 4}});
                CHECK(r.status == 400);
                CHECK(r.body.dump().find(items ? "input[1].content is missing"
                                               : "messages[1].content is missing") != std::string::npos);
            }
        }
        for (const json& content : {json(nullptr), json("")}) {
            const json body = {{"messages",
                                {hi,
                                 {{"role", "assistant"}, {"content", content}, {"tool_calls", {call}}},
                                 {{"role", "tool"}, {"tool_call_id", "a"}, {"content", "noon"}}}},
                               {"max_tokens", 4}};
            CHECK(chat(server, body).status == 200);
        }
        CHECK(chat(server, {{"messages", {hi, {{"role", "assistant"}, {"tool_calls", {call}}}, hi}},
                            {"max_tokens", 4}})
                  .status == 200);
        CHECK(
            chat(server, {{"messages", {{{"role", "system"}, {"content", nullptr}}, hi}}, {"max_tokens", 4}})
                .status == 200);
    }

    TEST_CASE("serve: bad requests are told what is wrong and end nothing") {
        const ServerProcess server({"--strict-params", "-c", "256"});
        const auto refused = [&](json change, const char* param, const char* code = "invalid_value") {
            json body = question("Hi");
            body.update(change);
            const Reply r = chat(server, body);
            CAPTURE(body.dump());
            CHECK(r.status == 400);
            CHECK(r.body["error"]["type"] == "invalid_request_error");
            CHECK(r.body["error"]["param"] == param);
            CHECK(r.body["error"]["code"] == code);
        };
        refused({{"messages", json::array()}}, "messages");
        refused({{"messages", {{{"role", "robot"}, {"content", "x"}}}}}, "messages[0].role");
        refused({{"temperature", "0.7"}}, "temperature");
        refused({{"temperature", -1}}, "temperature");
        refused({{"top_p", 1.1}}, "top_p");
        refused({{"max_tokens", 0}}, "max_tokens");
        refused({{"max_tokens", 1.5}}, "max_tokens");
        refused({{"n", 9}}, "n");
        refused({{"stop", {3}}}, "stop");
        refused({{"logit_bias", {{"-1", 1}}}}, "logit_bias");
        refused({{"top_logprobs", 2}}, "top_logprobs");
        refused({{"tool_choice", "required"}}, "tool_choice");
        refused({{"tools", {kTime, kTime}}}, "tools[1].function.name");
        refused({{"chat_template_kwargs", {{"chat_template", "x"}}}}, "chat_template_kwargs.chat_template",
                "unknown_parameter");
        refused({{"response_format", {{"type", "xml"}}}}, "response_format.type");
        refused({{"grammar", "root ::= x"}}, "grammar", "unsupported_grammar");
        refused({{"surprise", 1}}, "surprise", "unknown_parameter");
        std::string words;
        for (int i = 0; i < 400; ++i) words += "word ";
        refused({{"messages", {{{"role", "user"}, {"content", words}}}}}, "messages",
                "context_length_exceeded");
        CHECK(
            chat(server, {{"model", "other"}, {"messages", {{{"role", "user"}, {"content", "x"}}}}}).status ==
            404);
        for (const std::string text :
             {"", "null", "[]", "{", "{\"a\":NaN}", "{\"messages\":[],\"messages\":[]}"}) {
            CAPTURE(text);
            CHECK(chat(server, text).status == 400);
        }
        CHECK(chat(server, std::string(1000000, '[')).status == 400);
        CHECK(chat(server, question("still there?")).status == 200);
    }
}

}  // namespace
}  // namespace quern
