// JSON schemas while decoding: what may follow, byte by byte, against documents written by hand.
#include <doctest/doctest.h>

#include "ggml-like/error.h"
#include "tools/engine/json_schema.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

std::shared_ptr<const JsonSchema> compile(const char* text) {
    return std::make_shared<JsonSchema>(ordered_json::parse(text));
}

bool whole(const std::shared_ptr<const JsonSchema>& schema, std::string_view document) {
    JsonMatcher m(schema);
    for (const char c : document) {
        if (!m.accepts({&c, 1})) return false;
        m.push({&c, 1});
    }
    JsonMatcher at_once(schema);
    at_once.push(document);
    CHECK(at_once.complete() == m.complete());
    return m.complete();
}

TEST_SUITE("cpu") {
    TEST_CASE("json schema: documents that fit and documents that do not") {
        const auto person =
            compile(R"({"type":"object","properties":{"name":{"type":"string","minLength":1,"maxLength":5},
            "age":{"type":"integer"},"tags":{"type":"array","items":{"enum":["a","ab"]},"maxItems":2}},
            "required":["name"]})");
        for (const char* good :
             {R"({"name":"x"})", R"({"age":-3,"name":"xyzuv"})", R"({ "name" : "\u00e9\n" , "tags":[]})",
              R"({"tags":["ab","a"],"name":"ñandú"})"}) {
            CAPTURE(good);
            CHECK(whole(person, good));
        }
        for (const char* bad :
             {"{}", R"({"name":""})", R"({"name":"toolong"})", R"({"name":"x","age":1.5})",
              R"({"name":"x","name":"y"})", R"({"name":"x","other":1})", R"({"name":"x",})",
              R"({"name":"x","tags":["a","a","a"]})", R"({"name":"x","tags":["abc"]})", "[]",
              R"({"name":"x"}})", R"({"name":"x"} y)", "{\"name\":\"\x01\"}", "{\"name\":\"\xC3\"}"}) {
            CAPTURE(bad);
            CHECK_FALSE(whole(person, bad));
        }
    }

    TEST_CASE("json schema: numbers, alternatives, references, any value") {
        const auto number = compile(R"({"type":"number"})");
        for (const char* good : {"0", "-1", "10.5", "1e9", "-0.1E-3"}) CHECK(whole(number, good));
        for (const char* bad : {"01", "-", "1.", ".5", "1e", "+1", "true"}) CHECK_FALSE(whole(number, bad));
        const auto either =
            compile(R"({"anyOf":[{"type":"null"},{"const":"yes"},{"type":["boolean","array"]}]})");
        for (const char* good : {"null", "\"yes\"", "true", "[1,{\"a\":[]}]"}) CHECK(whole(either, good));
        for (const char* bad : {"\"no\"", "1", "nul", "{}"}) CHECK_FALSE(whole(either, bad));
        const auto tree = compile(R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":
            {"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["next"]}}})");
        CHECK(whole(tree, R"({"next":{"next":{"next":null}}})"));
        CHECK_FALSE(whole(tree, R"({"next":{}})"));
        CHECK(whole(compile(R"({"type":"object"})"), R"({"a":[1,"b",{"c":null}],"d":false})"));
    }

    TEST_CASE("json schema: what is not supported is named, what never ends is refused") {
        const auto message = [](const char* schema) -> std::string {
            try {
                compile(schema);
            } catch (const Error& error) {
                CHECK(error.kind() == ErrorKind::usage);
                return error.what();
            }
            return "";
        };
        CHECK(message(R"({"type":"object","properties":{"a":{"type":"string","pattern":"x"}}})") ==
              "$.properties.a: 'pattern' is not supported");
        CHECK(message(R"({"type":"integer","minimum":3})").find("'minimum'") != std::string::npos);
        CHECK(message(R"({"type":"text"})").find("\"text\"") != std::string::npos);
        CHECK(message(R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})").find("own alternatives") !=
              std::string::npos);
        CHECK(message(R"({"$ref":"http://example.org/x"})").find("not supported") != std::string::npos);
        CHECK(message(R"({"required":["a"],"properties":{}})").find("required") != std::string::npos);
        CHECK(message(R"({"title":"t","description":"d","format":"date","type":"string"})").empty());
        std::string deep = "{}";
        for (int i = 0; i < 100; ++i) deep = R"({"items":)" + deep + "}";
        CHECK(message(deep.c_str()).find("nested") != std::string::npos);
    }

    TEST_CASE("json schema: a document always ends") {
        JsonMatcher m(compile("{}"));
        CHECK_FALSE(m.accepts(std::string(200, '\n')));
        CHECK_FALSE(m.accepts(std::string(100, '1')));
        CHECK_FALSE(m.accepts(std::string(100, '[')));
        m.push("[1]");
        CHECK(m.finished());
        CHECK_FALSE(m.accepts(","));
        CHECK(m.accepts("\n"));
    }
}

}  // namespace
}  // namespace quern
