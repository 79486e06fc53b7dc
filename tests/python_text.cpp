// str.strip, json.dumps and literals as CPython has them; expected strings were printed by CPython.
#include "models/python_text.h"

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <vector>

using nlohmann::ordered_json;
using quern::parse_ordered_json;
using quern::parse_python_literal;
using quern::python_float;
using quern::python_json;

namespace {

std::string utf8(uint32_t c) {
    if (c < 0x80) return {static_cast<char>(c)};
    if (c < 0x800) return {static_cast<char>(0xc0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    return {static_cast<char>(0xe0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)),
            static_cast<char>(0x80 | (c & 63))};
}

std::string literal(std::string_view text) {
    const auto value = parse_python_literal(text);
    return value ? python_json(*value) : "no literal";
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("python text: white space is that of str.isspace, for the whole basic plane") {
        std::vector<uint32_t> found;
        for (uint32_t c = 0; c < 0x10000; ++c) {
            if (c >= 0xd800 && c < 0xe000) continue;
            const std::string text = utf8(c) + "x" + utf8(c);
            const bool front = quern::python_lstrip(text) != text;
            CHECK(front == (quern::python_rstrip(text) != text));
            if (front) found.push_back(c);
        }
        // [c for c in range(0x10000) if chr(c).isspace()]
        CHECK(found == std::vector<uint32_t>{9,    10,   11,   12,   13,   28,   29,   30,   31,   32,
                                             133,  160,  5760, 8192, 8193, 8194, 8195, 8196, 8197, 8198,
                                             8199, 8200, 8201, 8202, 8232, 8233, 8239, 8287, 12288});
        CHECK(quern::python_strip(" \n\t").empty());
        CHECK(quern::python_strip("\x85 \xa0") == "\x85 \xa0");  // no UTF-8, so no white space at the ends
    }

    TEST_CASE("python text: floats") {
        const std::vector<std::pair<double, std::string>> cases = {
            {0.0, "0.0"},
            {-0.0, "-0.0"},
            {1.0, "1.0"},
            {-2.5, "-2.5"},
            {0.1, "0.1"},
            {1e-4, "0.0001"},
            {1e-5, "1e-05"},
            {1.5e-7, "1.5e-07"},
            {1e15, "1000000000000000.0"},
            {1e16, "1e+16"},
            {123456789012345680.0, "1.2345678901234568e+17"},
            {5e-324, "5e-324"},
            {1.7976931348623157e308, "1.7976931348623157e+308"},
            {2.0 / 3, "0.6666666666666666"},
            {9007199254740993.0, "9007199254740992.0"},
            {123.456, "123.456"}};
        for (const auto& [value, text] : cases) CHECK(python_float(value) == text);
    }

    TEST_CASE("python text: json.dumps") {
        const auto value = parse_ordered_json(
            R"( {"z": [1, -2, 3.0, true, null, [], {}], "a": {"k": "q\"\\\/\b\f\n\r\t\u0001\u007fé\ud83d\ude00<>&'"}} )");
        REQUIRE(value);
        CHECK(python_json(*value) ==
              R"({"z": [1, -2, 3.0, true, null, [], {}], "a": {"k": "q\"\\/\b\f\n\r\t\u0001)"
              "\x7fé😀<>&'\"}}");
        ordered_json deep = 1;
        for (int i = 0; i < 20000; ++i) deep = ordered_json::array({std::move(deep)});
        CHECK(python_json(deep).size() == 40001);
    }

    TEST_CASE("python text: reading JSON keeps the order, bounds depth and stays linear") {
        CHECK(python_json(*parse_ordered_json(R"({"b":1,"a":{"x":1,"x":2},"b":[3]})")) ==
              R"({"b": [3], "a": {"x": 2}})");
        const auto nested = [](int depth) {
            const auto n = static_cast<size_t>(depth);
            return std::string(n, '[') + std::string(n, ']');
        };
        CHECK(parse_ordered_json(nested(64)));
        CHECK_FALSE(parse_ordered_json(nested(65)));
        CHECK_FALSE(parse_ordered_json(std::string(10000000, '[')));
        for (const char* bad : {"", "{", "{\"a\"}", "[1,]", "NaN", "1 2", "\"\xff\"", "1e400", "\"\\ud800\""})
            CHECK_FALSE(parse_ordered_json(bad));
        std::string many = "{";
        for (int i = 0; i < 100000; ++i) many += "\"" + std::to_string(i) + "\":0,";
        many += "\"end\":0}";
        const auto start = std::chrono::steady_clock::now();
        CHECK(parse_ordered_json(many)->size() == 100001);
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(3));
    }

    TEST_CASE("python text: literals") {
        CHECK(literal("{'a': True, \"b\": [None, False, (1, 2.50,),], 3: 'x' \"y\"}") ==
              R"({"a": true, "b": [null, false, [1, 2.5]], "3": "xy"})");
        CHECK(literal(R"('it\'s "\x41\u00e9\U0001F600\n\q')") == R"("it's \"Aé😀\n\\q")");
        CHECK(literal(" [ ] ") == "[]");
        CHECK(literal("-1e3") == "-1000.0");
        CHECK(literal("18446744073709551615") == "18446744073709551615");
        for (const char* bad : {"", "x", "[1 2]", "{'a'}", "'open", "[1", "f()", "1+1", "'\\ud800'", "007",
                                "-", "{'a': 1}}", "'\\x4", "\\", "{,}", "'"})
            CHECK(literal(bad) == "no literal");
        CHECK(literal(std::string(1000000, '[')) == "no literal");
        CHECK(literal(std::string(1000000, '{')) == "no literal");
    }
}
