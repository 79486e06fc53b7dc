// JSON schemas while decoding: what may follow, byte by byte, against documents written by hand.
#include <doctest/doctest.h>

#include <chrono>

#include "ggml-like/error.h"
#include "tools/engine/grammar.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

std::shared_ptr<const Grammar> compile(const char* text) { return Grammar::json(ordered_json::parse(text)); }

bool whole(const std::shared_ptr<const Grammar>& schema, std::string_view document) {
    GrammarMatcher m(schema);
    for (const char c : document) {
        if (!m.accepts({&c, 1})) return false;
        m.push({&c, 1});
    }
    GrammarMatcher at_once(schema);
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

    /// The message of the error that it raises, or what is not enforced.
    std::string said(const char* schema) {
        try {
            std::string all;
            const auto grammar = compile(schema);
            for (const std::string& place : grammar->not_enforced()) all += (all.empty() ? "" : " ") + place;
            return all;
        } catch (const Error& error) {
            CHECK(error.kind() == ErrorKind::usage);
            return error.what();
        }
    }

    TEST_CASE("json schema: what is not enforced is accepted and named, annotations are not") {
        CHECK(said(R"({"type":"object","properties":{"a":{"type":"array","uniqueItems":true},
                       "b":{"type":"number","multipleOf":0.3}},"minProperties":1})") ==
              "$.properties.a.uniqueItems $.properties.b.multipleOf $.minProperties");
        CHECK(said(R"({"additionalProperties":false,"allOf":[{"properties":{"a":{}}}]})") ==
              "$.allOf.additionalProperties");
        CHECK(whole(compile(R"({"type":"string","maxLength":2.0})"), "\"ab\""));
        CHECK(said(R"({"not":{"type":"string"},"if":true,"enum":[1]})") == "$.not $.if");
        CHECK(said(R"({"title":"t","description":"d","type":"string","x-order":1,"discriminator":{},
                       "default":1,"examples":[],"$schema":"s","$defs":{}})")
                  .empty());
        CHECK(whole(compile(R"({"type":"array","uniqueItems":true,"items":{"type":"integer"}})"), "[1,1]"));
    }

    TEST_CASE("json schema: what is wrong is named, what never ends is refused") {
        const auto says = [](const char* schema, const char* part) {
            CAPTURE(schema);
            CAPTURE(said(schema));
            CHECK(said(schema).find(part) != std::string::npos);
        };
        says(R"({"properties":{"a":{"type":"text"}}})", "$.properties.a: 'type' is \"text\"");
        says(R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})", "own alternatives");
        says(R"({"$ref":"#"})", "nest deeper");
        says(R"({"$ref":"#/$defs/none"})", "not in this schema");
        says(R"({"required":["a"],"properties":{},"additionalProperties":false})", "required");
        says(R"({"type":"array","minItems":2,"maxItems":1})", "no document fits");
        says(R"({"type":"object","properties":{"next":{"$ref":"#"}},"required":["next"]})",
             "no document fits");
        says(R"({"allOf":[{"type":"string"},{"type":"integer"}]})", "no document fits");
        says(R"({"properties":3})", "'properties' must be an object, found 3");
        says("[]", "must be an object, true or false, found a list");
        says(R"({"anyOf":"x"})", "'anyOf' must be a list, found \"x\"");
        says(R"({"anyOf":null})", "'anyOf' must be a list, found null");
        says(R"({"anyOf":[]})", "'anyOf' must be a list, found an empty one");
        says(R"({"type":"object","required":[1]})", "must be a list of names, found 1 in it");
        says(R"({"type":"string","minLength":-1})", "must be a whole number from 0 on, found -1");
        std::string deep = "{}", wide = R"({"anyOf":[)", product = R"({"allOf":[)";
        for (int i = 0; i < 100; ++i) deep = R"({"items":)" + deep + "}";
        says(deep.c_str(), "nested");
        for (int i = 0; i < 300; ++i) wide += R"({"const":)" + std::to_string(i) + "},";
        says((wide + "true]}").c_str(), "alternatives");
        for (int i = 0; i < 20; ++i) product += R"({"anyOf":[{"minLength":1},{"maxLength":2}]},)";
        says((product + "true]}").c_str(), "alternatives");
    }

    TEST_CASE("json schema: grammar bombs end soon") {
        const auto begun = std::chrono::steady_clock::now();
        // Each definition names the one before twice, beside something that keeps them apart.
        std::string defs;
        for (int i = 1; i < 60; ++i) {
            const std::string before = R"({"$ref":"#/$defs/d)" + std::to_string(i - 1) + "\"";
            defs += R"(,"d)" + std::to_string(i) + R"(":{"properties":{"a":)" + before +
                    R"(,"minLength":1},"b":)" + before + R"(,"minLength":2}}})";
        }
        said((R"({"$ref":"#/$defs/d59","$defs":{"d0":{})" + defs + "}}").c_str());
        CHECK(
            said(R"({"type":"array","minItems":1000000000,"maxItems":2000000000,"items":{"type":"integer"}})")
                .empty());
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(20));
    }

    TEST_CASE("json schema: keywords side by side, tuples, nullable, references anywhere") {
        const auto tuple =
            compile(R"({"type":"array","prefixItems":[{"type":"integer"},{"enum":["a"]}],"items":false})");
        for (const char* good : {"[]", "[1]", R"([1, "a"])"}) CHECK(whole(tuple, good));
        for (const char* bad : {R"(["a"])", R"([1,"a",2])", R"([1,"b"])"}) CHECK_FALSE(whole(tuple, bad));
        const auto both =
            compile(R"({"allOf":[{"type":"object","properties":{"a":{"type":"number"}},"required":["a"]},
            {"properties":{"b":{"type":"string"},"a":{"type":"integer"}},"required":["b"]}]})");
        CHECK(whole(both, R"({"b":"x","a":1})"));
        for (const char* bad : {R"({"a":1})", R"({"b":"x"})", R"({"a":1.5,"b":"x"})"})
            CHECK_FALSE(whole(both, bad));
        const auto beside = compile(
            R"({"type":"object","properties":{"k":{"type":"string"},"n":{"type":"integer"}},"required":["k"],
            "anyOf":[{"properties":{"k":{"const":"a"}}},{"properties":{"k":{"const":"b"}},"required":["n"]}]})");
        for (const char* good : {R"({"k":"a"})", R"({"k":"b","n":1})", R"({"n":1,"k":"b"})"})
            CHECK(whole(beside, good));
        for (const char* bad : {R"({"k":"b"})", R"({"k":"c","n":1})"}) CHECK_FALSE(whole(beside, bad));
        const auto null = compile(R"({"type":"string","nullable":true,"enum":["x"]})");
        for (const char* good : {"null", "\"x\""}) CHECK(whole(null, good));
        CHECK_FALSE(whole(null, "\"y\""));
        const auto same =
            compile(R"({"type":"object","properties":{"a":{"enum":[1,2]},"b":{"$ref":"#/properties/a"},
            "c~/":{"$ref":"#/properties/c~0~1/x","x":{"type":"null"}}}})");
        CHECK(whole(same, R"({"b":2,"c~/":null})"));
        CHECK_FALSE(whole(same, R"({"b":3})"));
        const auto sibling =
            compile(R"({"$ref":"#/$defs/s","maxLength":3,"$defs":{"s":{"type":"string","minLength":2}}})");
        CHECK(whole(sibling, "\"abc\""));
        for (const char* bad : {"\"a\"", "\"abcd\"", "1"}) CHECK_FALSE(whole(sibling, bad));
        const auto other =
            compile(R"({"type":"object","properties":{"a":{"type":"null"}},"additionalProperties":
            {"type":"integer"},"required":["z"]})");
        CHECK(whole(other, R"({"q":1,"z":2})"));
        for (const char* bad : {R"({"q":1})", R"({"z":null})", R"({"a":1,"z":1})"})
            CHECK_FALSE(whole(other, bad));
    }

    TEST_CASE("json schema: at most one blank between tokens, none around the document") {
        const auto schema = compile(R"({"type":"object","properties":{"a":{"type":"array"}}})");
        CHECK(whole(schema, "{\n\"a\" : [ 1 ,\n2 ] }"));
        for (const char* bad : {" {}", "{  }", "{\"a\":  []}", "{\"a\":[1  ]}", "{} ", "{\"a\" \n:[]}"}) {
            CAPTURE(bad);
            CHECK_FALSE(whole(schema, bad));
        }
    }

    TEST_CASE("json schema: many values that begin alike") {
        std::string list = R"({"enum":[)";
        for (int i = 0; i < 1999; ++i) list += "\"value " + std::to_string(i) + "\",";
        const auto schema = compile((list + "\"value\"]}").c_str());
        for (const char* good : {"\"value 0\"", "\"value 1998\"", "\"value 19\"", "\"value\""})
            CHECK(whole(schema, good));
        for (const char* bad : {"\"value 1999\"", "\"value \"", "\"valu\""}) CHECK_FALSE(whole(schema, bad));
    }

    TEST_CASE("json schema: text is UTF-8, and escapes are characters") {
        const auto schema = compile(R"({"type":"string","maxLength":2})");
        for (const char* good :
             {R"("\ud83d\ude00x")", R"("\uD7FF")", "\"\xF0\x9F\x98\x80\"", "\"\x7F\"", R"("\/\"")"}) {
            CAPTURE(good);
            CHECK(whole(schema, good));
            CHECK_FALSE(ordered_json::parse(good, nullptr, false).is_discarded());
        }
        for (const char* bad :
             {R"("\ud83d")", R"("\ude00")", R"("\ud83dx")", R"("\ud83d\u0041")", "\"\xED\xA0\x80\"",
              "\"\xE0\x80\x80\"", "\"\xF4\x90\x80\x80\"", "\"\xC0\x80\"", R"("\x")"}) {
            CAPTURE(bad);
            CHECK_FALSE(whole(schema, bad));
        }
        CHECK_FALSE(whole(compile(R"({"type":"number"})"), "1e999"));
    }

    TEST_CASE("json schema: several bytes at once are accepted as they are one by one, wherever they come") {
        const auto schema = compile(R"({"type":"object","properties":{"name":{"type":"string","minLength":2,
            "maxLength":9},"any":true,"text":{"anyOf":[{"type":"string","maxLength":3},{"type":"string","minLength":5},
            {"type":"null"}]}},"additionalProperties":{"type":"string","pattern":"^[a-c]+$"}})");
        const std::vector<std::string> pieces = {
            "a",    "ab",      "\"", "a\"",  "\",",  "\":",      "\\",   "\\u",  "\\n",      "00e9",
            "d83d", "\\ude00", "é",  "\xC3", "\xA9", "\xF0\x9F", "\n",   "\x01", "abcdefgh", "abcdefghij",
            "x\\",  "{\"",     "}",  ",",    ":",    " ",        "null", "1",    "\\\"",     "\xFF"};
        const auto one_by_one = [](GrammarMatcher m, std::string_view bytes) {
            for (const char c : bytes) m.push({&c, 1});
            return !m.dead();
        };
        for (const char* document : {R"({"name":"\u00e9\ud83d\ude00b","text":"ab"})",
                                     R"({"any":{"x":["é\\","😀"]},"text":"abcdé\n"})",
                                     R"({"abc":"abca","name":"ñandú","any":"\\\""})"}) {
            GrammarMatcher m(schema);
            for (const char* c = document; *c != 0; ++c) {
                CAPTURE(std::string_view(document, static_cast<size_t>(c - document)));
                for (int again = 0; again < 2;
                     ++again)  // later questions at one place have a way of their own
                    for (const std::string& piece : pieces) {
                        CAPTURE(piece);
                        REQUIRE(m.accepts(piece) == one_by_one(m, piece));
                    }
                m.push({c, 1});
                REQUIRE(!m.dead());
            }
            CHECK(m.complete());
        }
    }

    TEST_CASE("grammar: a choice among texts") {
        const auto schema = Grammar::choice({"yes", "no", "yes please"});
        for (const char* good : {"yes", "no", "yes please"}) CHECK(whole(schema, good));
        for (const char* bad : {"ye", "maybe", "nope", "yes ", " yes"}) CHECK_FALSE(whole(schema, bad));
        CHECK_THROWS_AS(Grammar::choice({}), Error);
        CHECK_THROWS_AS(Grammar::choice({"a", ""}), Error);
    }

    TEST_CASE("json schema: a document always ends") {
        GrammarMatcher m(compile("{}"));
        CHECK_FALSE(m.accepts("\n"));
        CHECK_FALSE(m.accepts(std::string(100, '1')));
        CHECK_FALSE(m.accepts(std::string(100, '[')));
        m.push("[1]");
        CHECK(m.finished());
        CHECK_FALSE(m.accepts(","));
        CHECK_FALSE(m.accepts("\n"));
        // As deep as it can get there is still a way out.
        GrammarMatcher deep(compile(R"({"type":"array","items":{"$ref":"#"},"minItems":0})"));
        while (deep.accepts("[")) deep.push("[");
        while (deep.accepts("]")) deep.push("]");
        CHECK(deep.finished());
    }
}

}  // namespace
}  // namespace quern
