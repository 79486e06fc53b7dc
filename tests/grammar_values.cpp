// Bounds of numbers, patterns, formats and patterns of keys: documents that fit and do not, and every number by brute force.
#include <doctest/doctest.h>

#include <cmath>
#include <random>

#include "ggml-like/error.h"
#include "tools/engine/grammar.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

std::shared_ptr<const Grammar> compile(const std::string& text) {
    return Grammar::json(ordered_json::parse(text));
}

bool whole(const std::shared_ptr<const Grammar>& schema, std::string_view document) {
    GrammarMatcher m(schema);
    for (const char c : document) {
        if (!m.accepts({&c, 1})) return false;
        m.push({&c, 1});
    }
    return m.complete();
}

void fits(const std::string& schema, std::initializer_list<const char*> good,
          std::initializer_list<const char*> bad, const std::string& not_enforced = "") {
    CAPTURE(schema);
    const auto grammar = compile(schema);
    std::string noted;
    for (const std::string& place : grammar->not_enforced()) noted += (noted.empty() ? "" : " ") + place;
    CHECK(noted == not_enforced);
    for (const char* document : good) {
        CAPTURE(std::string(document));
        CHECK(whole(grammar, document));
    }
    for (const char* document : bad) {
        CAPTURE(document);
        CHECK_FALSE(whole(grammar, document));
    }
}

/// Writes a document byte by byte, each time one of those that may come; empty if it got stuck or never ended.
std::string some_document(const std::shared_ptr<const Grammar>& grammar, unsigned seed) {
    std::mt19937 random(seed);
    GrammarMatcher m(grammar);
    std::string text;
    while (text.size() < 2000) {
        if (m.complete() && (m.finished() || random() % 2 == 0)) return text;
        std::string next;
        for (int b = 1; b < 128; ++b) {
            const char c = static_cast<char>(b);
            if (m.accepts({&c, 1})) next += c;
        }
        if (next.empty()) return m.complete() ? text : "";
        text += next[random() % next.size()];
        m.push({&text.back(), 1});
    }
    return "";
}

TEST_SUITE("cpu") {
    TEST_CASE("bounds of integers: exactly the numbers that fit, and no way into nothing") {
        std::mt19937 random(7);
        for (int round = 0; round < 120; ++round) {
            const int low = static_cast<int>(random() % 3000) - 1500,
                      high = low + static_cast<int>(random() % 400);
            const int multiple = round % 3 == 0 ? 1 + static_cast<int>(random() % 60) : 0;
            const bool open = round % 2 == 0;
            ordered_json schema = {
                {"type", "integer"}, {open ? "exclusiveMinimum" : "minimum", low}, {"maximum", high}};
            if (multiple > 0) schema["multipleOf"] = multiple;
            CAPTURE(schema.dump());
            const auto expected = [&](int n) {
                return (open ? n > low : n >= low) && n <= high && (multiple == 0 || n % multiple == 0);
            };
            int any = 0;
            for (int n = low - 3; n <= high + 3; ++n) any += expected(n);
            if (any == 0) {
                CHECK_THROWS_WITH_AS(Grammar::json(schema), doctest::Contains("no document fits"), Error);
                continue;
            }
            const auto grammar = Grammar::json(schema);
            int wrong = 0;
            for (int n = -2000; n <= 2000; ++n) wrong += whole(grammar, std::to_string(n)) != expected(n);
            CHECK(wrong == 0);
            for (unsigned seed = 0; seed < 10; ++seed) {  // whatever the model does, it gets there
                const std::string text = some_document(grammar, seed);
                REQUIRE(!text.empty());
                CHECK(expected(std::stoi(text)));
            }
        }
        fits(R"({"type":"integer","minimum":0})", {"0", "7", "12345678901234567"}, {"-1", "-", "1.0", "1e3"});
        fits(R"({"type":"integer","minimum":10,"maximum":10})", {"10"}, {"1", "100", "-10", "010"});
        fits(R"({"type":"integer","multipleOf":1000000})", {"0", "-3000000", "1000000"}, {"1", "500000"});
    }

    TEST_CASE("bounds of numbers: as the parser of the text sees them") {
        fits(R"({"type":"number","minimum":0,"exclusiveMaximum":1})", {"0", "0.0", "0.999", "0.5"},
             {"1", "1.0", "-0.1", "-0", "0.", "1e-3"});
        fits(R"({"type":"number","exclusiveMinimum":-0.5,"maximum":12.25})",
             {"-0.4", "-0.49999", "12.25", "3", "12.2500"}, {"-0.5", "-1", "12.251", "13"});
        fits(R"({"type":"number","multipleOf":0.01})", {"1.25", "-3", "0.1"}, {"1.255"});
        fits(R"({"type":"number","multipleOf":0.5})", {"1.255"}, {}, "$.multipleOf");
        fits(R"({"type":["number","null"],"minimum":5})", {"5", "null", "17.5"}, {"4.9"});
        fits(R"({"allOf":[{"type":"integer","minimum":2},{"maximum":4}]})", {"2", "4"}, {"1", "5"});
        fits(R"({"type":"integer","minimum":5,"exclusiveMinimum":true})", {"5"}, {"4"}, "$.exclusiveMinimum");
        std::mt19937 random(3);
        for (int round = 0; round < 60; ++round) {
            const double low = (static_cast<int>(random() % 4000) - 2000) / 100.0,
                         high = low + random() % 500 / 100.0;
            const auto grammar = Grammar::json({{"type", "number"}, {"minimum", low}, {"maximum", high}});
            CAPTURE(low);
            CAPTURE(high);
            int wrong = 0;
            for (int i = -3000; i <= 3000; ++i) {
                char text[32];
                std::snprintf(text, sizeof text, "%.2f", i / 100.0);
                const double value = std::stod(text);
                wrong += whole(grammar, text) != (value >= low && value <= high);
            }
            CHECK(wrong == 0);
        }
    }

    TEST_CASE("patterns of strings: somewhere or whole, with what JSON escapes") {
        fits(R"({"type":"string","pattern":"^[A-Z]{2}\\d+$"})", {"\"AB1\"", "\"XY007\""},
             {"\"AB\"", "\"xAB1\"", "\"AB1x\"", "AB1"});
        fits(R"({"type":"string","pattern":"b+"})", {"\"b\"", "\"abba\"", "\"\u00e9b\"", "\"b\\n\""},
             {"\"\"", "\"aa\""});
        fits(R"({"type":"string","pattern":"^a|z$"})", {"\"a1\"", "\"1z\""}, {"\"1a1\""});
        fits(R"({"type":"string","pattern":"^[\"\\\\]$"})", {R"("\"")", R"("\\")"}, {R"(""")", R"("a")"});
        fits(R"({"type":"string","pattern":"^.$"})", {"\"x\"", R"("\"")", R"("\t")", R"("\u0001")"},
             {R"("\n")", "\"xy\""});
        fits(R"({"pattern":"^x$"})", {"\"x\"", "3", "[]", "null"}, {"\"y\""});
        fits(R"({"type":["string","null"],"pattern":"^x$"})", {"\"x\"", "null"}, {"\"y\"", "3"});
        fits(R"({"type":"string","pattern":"^(?!a)b"})", {"\"b\"", "\"c\""}, {}, "$.pattern");
        fits(R"({"type":"string","pattern":"a","maxLength":3})", {"\"aaaa\""}, {"\"b\""}, "$.maxLength");
        fits(
            R"({"type":"object","properties":{"a":{"type":"string","pattern":"^\\d{3}$"},"b":{"type":"integer"}},"required":["a"]})",
            {R"({"a":"123"})", R"({"b":1, "a":"123"})", R"({"a":"123","b":2})"},
            {R"({"a":"12"})", R"({"b":1})"});
        fits(R"({"type":"array","items":{"type":"string","pattern":"^[ab]$"},"maxItems":2})",
             {"[\"a\"]", "[\"a\",\"b\"]"}, {"[\"c\"]", "[\"a\",\"b\",\"a\"]"});
    }

    TEST_CASE("formats: examples of the standards, and others") {
        const auto format = [](const char* name) {
            return std::string(R"({"type":"string","format":")") + name + "\"}";
        };
        fits(format("date"), {"\"2024-02-29\"", "\"1999-12-31\"", "\"2000-02-29\""},
             {"\"2023-02-29\"", "\"1900-02-29\"", "\"2024-13-01\"", "\"2024-04-31\"", "\"24-01-01\"",
              "\"2024-1-1\""});
        fits(format("time"), {"\"12:30:00Z\"", "\"23:59:59.999+05:30\""},
             {"\"24:00:00Z\"", "\"12:30\"", "\"12:30:00\""});
        fits(format("date-time"), {"\"1985-04-12T23:20:50.52Z\"", "\"1996-12-19T16:39:57-08:00\""},
             {"\"1985-04-12\"", "\"1985-04-12 23:20:50Z\""});
        fits(format("duration"), {"\"P3Y6M4DT12H30M5S\"", "\"PT36H\"", "\"P2W\"", "\"P1D\""},
             {"\"P\"", "\"1D\"", "\"P1D2H\"", "\"PT\""});
        fits(format("email"), {"\"ines@example.org\"", "\"a.b+c@x-y.co\""},
             {"\"example.org\"", "\"a@\"", "\".a@b.c\"", "\"a b@c.d\""});
        fits(format("hostname"), {"\"a.example\"", "\"x-1.y\""}, {"\"-a\"", "\"a..b\"", "\"a_b\""});
        fits(format("uuid"), {"\"2EB8AA08-aa98-11ea-b4aa-73b441d16380\""},
             {"\"2eb8aa08-aa98-11ea-b4aa-73b441d1638\"", "\"2eb8aa08aa9811eab4aa73b441d16380\""});
        fits(format("ipv4"), {"\"192.168.0.1\"", "\"255.255.255.255\"", "\"0.0.0.0\""},
             {"\"256.0.0.1\"", "\"1.2.3\"", "\"01.2.3.4\""});
        fits(format("ipv6"),
             {"\"::1\"", "\"::\"", "\"2001:db8::8a2e:370:7334\"", "\"1:2:3:4:5:6:7:8\"", "\"1::\""},
             {"\"12345::\"", "\"1:2:3:4:5:6:7:8:9\"", "\"1::2::3\"", "\":1\""});
        fits(format("uri"), {"\"https://example.org/a?b=c#d\"", "\"urn:isbn:123\"", "\"mailto:a@b.c\""},
             {"\"/a/b\"", "\"//x\"", "\"a b:c\"", "\"http://x/%zz\""});
        fits(format("unknown-one"), {"\"x\""}, {"1"}, "$.format");
        for (const char* name :
             {"date", "date-time", "time", "duration", "email", "uuid", "ipv4", "hostname"}) {
            CAPTURE(name);
            int ended = 0;
            for (unsigned seed = 0; seed < 4; ++seed)
                ended += !some_document(compile(format(name)), seed).empty();
            CHECK(ended == 4);
        }
    }

    TEST_CASE("patterns of keys") {
        fits(
            R"({"type":"object","patternProperties":{"^n_":{"type":"integer"},"^s_":{"type":"string"}},"additionalProperties":false})",
            {"{}", R"({"n_a":1})", R"({"n_a":1, "s_b":"x", "n_":2})"},
            {R"({"n_a":"x"})", R"({"a":1})", R"({"xn_a":1})", R"({"s_b":1})", R"({"n_a":1,})"});
        fits(
            R"({"patternProperties":{"^\\d+$":{"type":"object","patternProperties":{"x":{"type":"null"}}}},"type":"object"})",
            {R"({"12":{"axb":null}})"}, {R"({"12":{"ab":null}})", R"({"a":{}})"});
        fits(
            R"({"type":"object","properties":{"id":{"type":"integer"}},"patternProperties":{"^x-":{}},"additionalProperties":false})",
            {R"({"id":1,"x-a":[1]})", R"({"x-a":{"b":1},"id":1})"}, {R"({"id":"1"})", R"({"y":1})"},
            "$.patternProperties");
        fits(
            R"({"type":"object","patternProperties":{"(?=a)b":{"type":"integer"}},"additionalProperties":{"type":"integer"}})",
            {R"({"a":1})"}, {R"({"a":"x"})"}, "$.patternProperties.(?=a)b");
    }

    TEST_CASE("not and if stay a remark; what a bad pattern says is no reason to refuse a schema") {
        fits(R"({"type":"integer","not":{"const":3},"if":true,"then":false})", {"3"}, {"\"3\""},
             "$.not $.if $.then");
        fits(R"({"type":"string","pattern":"(["})", {"\"x\""}, {"3"}, "$.pattern");
        fits(R"({"type":"string","pattern":7,"format":null})", {"\"x\""}, {"3"}, "$.pattern $.format");
        fits(R"({"type":"string","pattern":"(a{1000}){1000}"})", {"\"x\""}, {"3"}, "$.pattern");
    }
}

}  // namespace
}  // namespace quern
