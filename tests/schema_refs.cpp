// References of JSON schemas by pointer, by $id and by anchor, against places written by hand.
#include "tools/engine/schema_refs.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <chrono>

#include "ggml-like/error.h"
#include "models/tool_schema.h"
#include "tools/engine/grammar.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

std::string ref_at(const char* schema, const char* place) {
    const ordered_json out = with_local_refs(ordered_json::parse(schema));
    return out.at(ordered_json::json_pointer(place))["$ref"].get<std::string>();
}

bool fits(const ordered_json& schema, const char* document, const char* not_enforced = "") {
    const auto grammar = Grammar::json(schema);
    std::string remarks;
    for (const std::string& remark : grammar->not_enforced())
        remarks += (remarks.empty() ? "" : " ") + remark;
    CHECK(remarks == not_enforced);
    GrammarMatcher matcher(grammar);
    matcher.push(document);
    return matcher.complete();
}

bool accepted(const std::shared_ptr<const Grammar>& grammar, const std::string& text) {
    GrammarMatcher matcher(grammar);
    matcher.push(text);
    return matcher.complete();
}

TEST_SUITE("cpu") {
    TEST_CASE("schema references: by pointer, identifier and anchor") {
        CHECK(ref_at(R"({"a":{"$ref":"#/$defs/x%20y"},"$defs":{"x y":{}}})", "/a") == "#/$defs/x y");
        CHECK(ref_at(R"({"a":{"$ref":"#/$defs/x~1y"},"$defs":{"x/y":{}}})", "/a") == "#/$defs/x~1y");
        CHECK(ref_at(R"({"a":{"$ref":"T0"},"$defs":{"T":{"$id":"T0"}}})", "/a") == "#/$defs/T");
        CHECK(ref_at(R"({"$id":"T0","a":{"$ref":"T0"}})", "/a") == "#");
        CHECK(ref_at(R"({"a":{"$ref":"#here"},"$defs":{"T":{"$anchor":"here"}}})", "/a") == "#/$defs/T");
        constexpr const char* kNested = R"({"$id":"http://a.example/x/root.json","a":{"$ref":"item.json"},
            "b":{"$ref":"/y/other.json#/$defs/n"},"c":{"$ref":"http://a.example/x/item.json#top"},
            "d":{"$ref":"missing.json"},
            "$defs":{"i":{"$id":"item.json","$anchor":"top","e":{"$ref":"#/f"},"f":{}},
                     "o":{"$id":"http://a.example/y/other.json","$defs":{"n":{}}}}})";
        CHECK(ref_at(kNested, "/a") == "#/$defs/i");
        CHECK(ref_at(kNested, "/b") == "#/$defs/o/$defs/n");
        CHECK(ref_at(kNested, "/c") == "#/$defs/i");
        CHECK(ref_at(kNested, "/d") == "missing.json");
        CHECK(ref_at(kNested, "/$defs/i/e") == "#/$defs/i/f");
        // URNs have no folders; names of properties are no keywords; values are no schemas.
        CHECK(ref_at(R"({"$id":"urn:uuid:1","a":{"$ref":"urn:uuid:1#/b"},"b":{}})", "/a") == "#/b");
        CHECK(ref_at(R"({"properties":{"default":{"$ref":"T"},"$id":{"$id":"T"}}})", "/properties/default") ==
              "#/properties/$id");
        CHECK(ref_at(R"({"const":{"$ref":"T"},"$defs":{"T":{"$id":"T"}}})", "/const") == "T");
    }

    TEST_CASE("schema references: what is not there is refused, what is elsewhere is a remark") {
        const ordered_json tree = ordered_json::parse(
            R"({"$id":"node","type":"object","properties":{"next":{"anyOf":[{"$ref":"node"},{"type":"null"}]}},
                "required":["next"]})");
        CHECK(fits(tree, R"({"next":{"next":null}})"));
        CHECK_FALSE(fits(tree, R"({"next":{"next":1}})"));
        const auto refused = [](const char* schema) {
            try {
                Grammar::json(ordered_json::parse(schema));
            } catch (const Error& error) {
                return std::string(error.what());
            }
            return std::string();
        };
        CHECK(refused(R"({"$ref":"#/$defs/none"})") ==
              "$: '$ref' leads to '#/$defs/none', which is not in this schema");
        CHECK(refused(R"({"$ref":"#none"})") == "$: '$ref' leads to '#none', which is not in this schema");
        CHECK(fits({{"type", "integer"}, {"$ref", "http://example.org/x"}}, "3", "$.$ref"));
        CHECK_FALSE(fits({{"type", "integer"}, {"$ref", "http://example.org/x"}}, "\"3\"", "$.$ref"));
    }

    TEST_CASE("schema references: hostile schemas cost no more than their size") {
        const auto begun = std::chrono::steady_clock::now();
        const std::string longest(1 << 20, 'x');
        ordered_json many = {{"$id", longest}, {"type", "integer"}};
        for (int i = 0; i < 20000; ++i)
            many[longest.substr(0, 50000)]["allOf"].push_back(
                {{"$anchor", "a" + std::to_string(i)}, {"$ref", "#a" + std::to_string(i / 2)}});
        CHECK(with_local_refs(many).size() == many.size());
        ordered_json alternatives = ordered_json::array();
        for (int i = 0; i < 200; ++i) {
            ordered_json values = ordered_json::array();
            for (int j = 0; j < 1000; ++j) values.push_back(i * 1000 + j);
            alternatives.push_back({{"enum", values}});
        }
        CHECK(fits({{"oneOf", alternatives}}, "150007", "$.oneOf"));
        ordered_json patterns;
        for (int i = 0; i < 100; ++i) patterns["(a|b|c){1,50}" + std::to_string(i)] = true;
        CHECK(fits({{"type", "object"}, {"patternProperties", patterns}}, R"({"ab7":1})",
                   "$.patternProperties"));
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(10));
    }

    TEST_CASE("grammar of calls: parameters of a type that contains itself") {
        const ordered_json tools = ordered_json::parse(R"([{"name":"f","parameters":{"$ref":"#/$defs/Node",
            "$defs":{"Node":{"type":"object","properties":{"value":{"type":"integer"},"label":{"type":"string"},
                "next":{"anyOf":[{"$ref":"#/$defs/Node"},{"type":"null"}]}},"required":["value"],
                "additionalProperties":false}}}}])");
        const auto grammar = Grammar::calls(tools, {}, true);
        CHECK(grammar->not_enforced().empty());
        const auto call = [](const char* parameters) {
            return fmt::format("<function=f>\n{}\n</function>\n</tool_call>", parameters);
        };
        CHECK(accepted(grammar, call("<parameter=value>\n3\n</parameter>")));
        CHECK(accepted(grammar, call("<parameter=next>\n{\"value\": 1, \"next\": null}\n</parameter>\n"
                                     "<parameter=value>\n3\n</parameter>")));
        CHECK_FALSE(accepted(grammar, call("<parameter=value>\nthree\n</parameter>")));
        CHECK_FALSE(accepted(grammar, call("<parameter=label>\nx\n</parameter>")));
        CHECK_FALSE(accepted(grammar,
                             call("<parameter=value>\n3\n</parameter>\n<parameter=other>\n3\n</parameter>")));
        const ToolSchemas types(tools);
        CHECK(types.type("f", "value") == ParameterType::integer);
        CHECK(types.type("f", "next") == ParameterType::container);
        CHECK_FALSE(types.may_have("f", "other"));
        // Loops and places that are not there are schemas that say nothing.
        for (const char* odd : {R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}})",
                                R"({"$ref":"#/x"})", R"({"$ref":"#/~"})"})
            CHECK(parameters_object(ordered_json::parse(odd)).contains("$ref"));
    }

    TEST_CASE("oneOf: a remark only where documents may fit two alternatives") {
        const auto schema = [](const char* list) {
            return ordered_json{{"oneOf", ordered_json::parse(list)}};
        };
        CHECK(fits(schema(R"([{"type":"string"},{"type":["integer","null"]}])"), "1"));
        CHECK(fits(schema(R"([{"type":"number"},{"type":"integer"}])"), "1", "$.oneOf"));
        CHECK(fits(schema(R"([{"const":"a"},{"enum":["b","c"]}])"), "\"b\""));
        CHECK(fits(schema(R"([{"enum":["a","b"]},{"enum":["b","c"]}])"), "\"b\"", "$.oneOf"));
        constexpr const char* kTagged =
            R"([{"type":"object","properties":{"kind":{"const":"cat"},"lives":{"type":"integer"}},
            "required":["kind"]},{"type":"object","properties":{"kind":{"const":"dog"}},"required":["kind"]}])";
        CHECK(fits(schema(kTagged), R"({"kind":"cat","lives":9})"));
        CHECK(fits(schema(R"([{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]},
                             {"type":"object","properties":{"b":{"type":"integer"}},"required":["b"]}])"),
                   R"({"a":1})", "$.oneOf"));
        const ordered_json referred = ordered_json::parse(
            R"({"oneOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}],"$defs":{
                "a":{"type":"object","properties":{"t":{"enum":["x"]},"n":{"$ref":"#"}},"required":["t"]},
                "b":{"type":"object","properties":{"t":{"enum":["y"]},"n":{"$ref":"#"}}}}})");
        CHECK(fits(referred, R"({"t":"x","n":{"t":"y"}})"));
        // Alternatives that contain themselves end the search, too.
        CHECK(fits(ordered_json::parse(
                       R"({"oneOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}],"$defs":{
                "a":{"type":"object","properties":{"n":{"$ref":"#/$defs/a"}},"required":["n"]},
                "b":{"type":"object","properties":{"n":{"anyOf":[{"$ref":"#/$defs/a"},{"type":"null"}]}},"required":["n"]}}})"),
                   R"({"n":null})", "$.oneOf"));
    }

    TEST_CASE("required: a property that is not listed is any value, unless others are ruled out") {
        const ordered_json open = ordered_json::parse(
            R"({"type":"object","properties":{"a":{"type":"integer"}},"required":["a","b"]})");
        CHECK(fits(open, R"({"a":1,"b":[2]})"));
        CHECK_FALSE(fits(open, R"({"a":1})"));
        CHECK_FALSE(fits(open, R"({"a":1,"b":2,"c":3})"));
        ordered_json closed = open;
        closed["additionalProperties"] = false;
        CHECK_THROWS_AS(Grammar::json(closed), Error);
    }

    TEST_CASE("propertyNames: lists and expressions are enforced, the rest is a remark") {
        const auto record = [](const char* names, const char* more = "{}") {
            ordered_json out = {{"type", "object"},
                                {"propertyNames", ordered_json::parse(names)},
                                {"additionalProperties", {{"type", "integer"}}}};
            out.update(ordered_json::parse(more));
            return out;
        };
        CHECK(fits(record(R"({"type":"string"})"), R"({"any":1})"));
        CHECK(fits(record("true"), R"({"any":1})"));
        const ordered_json listed = record(R"({"type":"string","enum":["a","b"]})", R"({"required":["a"]})");
        CHECK(fits(listed, R"({"a":1,"b":2})"));
        CHECK_FALSE(fits(listed, R"({"b":2})"));
        CHECK_FALSE(fits(listed, R"({"a":1,"c":2})"));
        CHECK_FALSE(fits(listed, R"({"a":"x"})"));
        const ordered_json both =
            record(R"({"enum":["a","b"]})", R"({"properties":{"a":{"type":"null"},"z":{}}})");
        CHECK(fits(both, R"({"a":null,"b":3})"));
        CHECK_FALSE(fits(both, R"({"z":1})"));
        const ordered_json expression = record(R"({"pattern":"^[a-z]+$"})");
        CHECK(fits(expression, R"({"ab":1,"c":2})"));
        CHECK_FALSE(fits(expression, R"({"a1":1})"));
        CHECK_FALSE(fits(expression, R"({"ab":"x"})"));
        CHECK(fits(record(R"({"const":"only"})"), R"({"only":1})"));
        CHECK(fits(record(R"({"maxLength":2})"), R"({"ab":1})", "$.propertyNames"));
        CHECK(fits(record(R"({"pattern":"^a"})", R"({"properties":{"b":{}}})"), R"({"b":1})",
                   "$.propertyNames"));
    }

    TEST_CASE("keys that several expressions match are a remark") {
        const auto schema = [](const char* patterns) {
            return ordered_json{{"type", "object"},
                                {"patternProperties", ordered_json::parse(patterns)},
                                {"additionalProperties", false}};
        };
        CHECK(fits(schema(R"({"^n_":{"type":"integer"},"^s_":{"type":"string"}})"), R"({"n_a":1})"));
        CHECK(fits(schema(R"({"^n":{"type":"integer"},"_$":{"type":"string"}})"), R"({"na":1})",
                   "$.patternProperties"));
        CHECK(fits(schema(R"({"^[0-9]+$":{"type":"integer"},"^[a-f]+$":{}})"), R"({"12":1,"ab":"c"})"));
        CHECK(fits(schema(R"({"^a":{"type":"integer"},"b":false})"), R"({"a":1})", "$.patternProperties.b"));
    }
}

}  // namespace
}  // namespace quern
