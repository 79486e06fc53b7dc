#include "ggml-like/json_guard.h"

#include <doctest/doctest.h>

#include <string>

using quern::Error;
using quern::ErrorKind;
using quern::JsonOptions;
using quern::parse_json;
using quern::parse_json_ordered;

namespace {

/// The message of the error that `text` raises, or "" when it parses.
std::string error_of(std::string_view text, const JsonOptions& options = {}) {
    try {
        parse_json(text, "x.json", options);
    } catch (const Error& error) {
        CHECK(error.kind() == options.kind);
        return error.what();
    }
    return "";
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("json_guard: same document as the plain parser") {
        for (std::string text : {
                 "{}",
                 "[]",
                 "null",
                 "true",
                 "-1",
                 "18446744073709551615",
                 "-9223372036854775808",
                 "1.5e3",
                 "\"\"",
                 R"({"a":{"b":[1,2,{"c":null}],"aa":false},"":[[],{}],"b":"\u00e9\ud83d\ude00\u0000"})",
                 R"([{"z":1,"a":2},[3,[4,[5]]],"x"])",
                 " \n[ 1 , 2 ]\t",
             }) {
            CAPTURE(text);
            CHECK(parse_json(text, "x.json") == nlohmann::json::parse(text));
            CHECK(parse_json_ordered(text, "x.json") == nlohmann::ordered_json::parse(text));
        }
    }

    TEST_CASE("json_guard: depth") {
        const std::string deep = std::string(64, '[') + std::string(64, ']');
        CHECK(error_of(deep) == "");
        CHECK(contains(error_of("[" + deep + "]"), "nested deeper than 64"));
        CHECK(contains(error_of(std::string(10'000'000, '[')), "nested deeper than 64"));
        std::string objects;
        for (int i = 0; i < 65; ++i) objects += "{\"a\":";
        CHECK(contains(error_of(objects), "nested deeper than 64"));
        CHECK(contains(error_of("[[]]", {.max_depth = 1}), "nested deeper than 1"));
    }

    TEST_CASE("json_guard: duplicate keys") {
        CHECK(contains(error_of(R"({"a":1,"b":{"a":2},"a":3})"), "duplicate key \"a\""));
        CHECK(contains(error_of(R"({"b":1,"a":1,"b":3})"), "duplicate key \"b\""));
        CHECK(error_of(R"([{"a":1},{"a":1}])") == "");
        CHECK_THROWS_AS(parse_json_ordered(R"([{"b":1,"a":{},"b":3}])", "x"), Error);
        CHECK(parse_json_ordered(R"({"b":{"x":1},"a":{"x":[2]}})", "x").dump() ==
              R"({"b":{"x":1},"a":{"x":[2]}})");
        const JsonOptions lenient{.reject_duplicate_keys = false};
        CHECK(parse_json(R"({"a":{"x":1},"a":[2]})", "x", lenient) == nlohmann::json::parse(R"({"a":[2]})"));
    }

    TEST_CASE("json_guard: malformed text names the file and the place") {
        const std::string message = error_of("{\n  \"a\": 1,\n  oops\n}");
        CHECK(contains(message, "x.json is not valid JSON"));
        CHECK(contains(message, "line 3"));
        for (std::string text :
             {"", " ", "{", "[1,]", "{\"a\"}", "nan", "NaN", "[Infinity]", "1 2", "{} x", "'a'", "\"a",
              "\"\\ud800\"", "01", "[1e999]", "// c\n1", "\"\t\"", "\xff", "{\"a\":1,}"}) {
            CAPTURE(text);
            CHECK(error_of(text) != "");
        }
        CHECK(error_of(std::string("\"a\xff\"")) != "");         // invalid byte
        CHECK(error_of(std::string("\"\xc3\"")) != "");          // cut character
        CHECK(error_of(std::string("\"\xed\xa0\x80\"")) != "");  // encoded surrogate
        CHECK(error_of(std::string("[1\0]", 4)) != "");
    }

    TEST_CASE("json_guard: messages stay short and printable") {
        const std::string message = error_of("[\"" + std::string(5'000'000, 'x') + "\xff\"]");
        CHECK(message.size() < 400);
        for (char c : error_of("[\"\x1b[31m\xc3\x28\"]")) CHECK((c >= 0x20 && c < 0x7f));
        for (char c : error_of("{\"\\u001b\":1,\"\\u001b\":1}")) CHECK((c >= 0x20 && c < 0x7f));
    }

    TEST_CASE("json_guard: error kind of the caller") {
        const std::string typed = error_of("{", {.kind = ErrorKind::usage});  // error_of compares the kind
        CHECK(typed != "");
        CHECK(!contains(typed, "download"));
        CHECK(contains(error_of("{\"a\": 1, \"b"), "or download it again"));  // of a checkpoint
    }
}
