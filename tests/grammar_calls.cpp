// Tool calls while decoding: what the grammar lets through is read by the chat parser as a call that fits its schema, and
// every such call is let through. Schemas, calls and choices are random; the validator knows nothing of the grammar.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "models/qwen3_6_chat.h"
#include "tools/engine/grammar.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

class Random {
  public:
    explicit Random(uint64_t seed) : engine_(seed) {}
    size_t below(size_t n) { return engine_() % n; }
    bool chance(size_t percent) { return below(100) < percent; }
    template <typename T>
    const T& of(const std::vector<T>& list) {
        return list[below(list.size())];
    }

  private:
    std::mt19937_64 engine_;
};

int64_t characters(const std::string& text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

bool fits(const ordered_json& schema, const ordered_json& value);

bool fits_object(const ordered_json& schema, const ordered_json& value) {
    const ordered_json properties = schema.value("properties", ordered_json::object());
    for (const auto& key : schema.value("required", ordered_json::array()))
        if (!value.contains(key.get<std::string>())) return false;
    for (const auto& [key, member] : value.items()) {
        const ordered_json other = schema.value("additionalProperties", ordered_json(properties.empty()));
        if (!fits(properties.contains(key) ? properties[key] : other, member)) return false;
    }
    return true;
}

bool has_type(const std::string& type, const ordered_json& value) {
    return (type == "string" && value.is_string()) || (type == "integer" && value.is_number_integer()) ||
           (type == "number" && value.is_number()) || (type == "boolean" && value.is_boolean()) ||
           (type == "null" && value.is_null()) || (type == "object" && value.is_object()) ||
           (type == "array" && value.is_array());
}

bool fits(const ordered_json& schema, const ordered_json& value) {
    if (schema.is_boolean()) return schema.get<bool>();
    if (schema.contains("anyOf"))
        return std::any_of(schema["anyOf"].begin(), schema["anyOf"].end(),
                           [&](const ordered_json& one) { return fits(one, value); });
    if (schema.contains("enum"))
        return std::find(schema["enum"].begin(), schema["enum"].end(), value) != schema["enum"].end();
    if (schema.contains("type")) {
        const ordered_json types =
            schema["type"].is_array() ? schema["type"] : ordered_json::array({schema["type"]});
        if (std::none_of(types.begin(), types.end(),
                         [&](const ordered_json& type) { return has_type(type.get<std::string>(), value); }))
            return false;
    }
    if (value.is_string()) {
        const int64_t n = characters(value.get<std::string>());
        return n >= schema.value("minLength", 0) && n <= schema.value("maxLength", 1 << 30);
    }
    if (value.is_array()) {
        const auto n = static_cast<int>(value.size());
        return n >= schema.value("minItems", 0) && n <= schema.value("maxItems", 1 << 30) &&
               std::all_of(value.begin(), value.end(), [&](const ordered_json& item) {
                   return fits(schema.value("items", ordered_json(true)), item);
               });
    }
    return !value.is_object() || fits_object(schema, value);
}

const std::vector<std::string> kWords = {"city", "n", "list_of", "überall", "a b", "cit", "path"};

ordered_json random_object(Random& r, int depth);

ordered_json random_schema(Random& r, int depth) {
    switch (r.below(depth > 2 ? 7 : 10)) {
        case 0:
            return {{"type", "string"}};
        case 1: {
            const auto low = static_cast<int>(r.below(4));
            return {
                {"type", "string"}, {"minLength", low}, {"maxLength", low + static_cast<int>(r.below(8))}};
        }
        case 2:
            return {{"type", "string"}, {"enum", {"", "celsius", "cel", "line\nfeed", "x y"}}};
        case 3:
            return {{"type", "integer"}};
        case 4:
            return {{"type", r.chance(50) ? ordered_json("number") : ordered_json{"number", "null"}}};
        case 5:
            return {{"type", "boolean"}};
        case 6:
            return {{"enum", {3, 14, -1}}};
        case 7:
            return {
                {"type", "array"}, {"items", random_schema(r, depth + 1)}, {"minItems", 1}, {"maxItems", 3}};
        case 8:
            return {{"anyOf", {random_object(r, depth + 1), {{"type", "null"}}}}};
        default:
            return random_object(r, depth + 1);
    }
}

ordered_json random_object(Random& r, int depth) {
    ordered_json out = {
        {"type", "object"}, {"properties", ordered_json::object()}, {"required", ordered_json::array()}};
    for (const std::string& word : kWords) {
        if (!r.chance(40)) continue;
        out["properties"][word] = random_schema(r, depth);
        if (r.chance(50)) out["required"].push_back(word);
    }
    if (r.chance(20)) out["additionalProperties"] = random_schema(r, depth + 1);
    if (out["properties"].empty()) out["additionalProperties"] = {{"type", "integer"}};
    return out;
}

ordered_json random_tools(Random& r) {
    ordered_json tools = ordered_json::array();
    for (const char* name : {"get", "get_weather", "write-file"})
        tools.push_back(
            {{"type", "function"}, {"function", {{"name", name}, {"parameters", random_object(r, 0)}}}});
    return tools;
}

ordered_json parameters_of(const ordered_json& tools, const std::string& name) {
    for (const auto& tool : tools)
        if (tool["function"]["name"] == name) return tool["function"]["parameters"];
    return nullptr;
}

Message parsed(const std::string& text, const ordered_json& tools) {
    const auto parser = make_qwen3_6_parser(false, tools, 1);
    parser->push("<tool_call>" + text);
    parser->finish();
    return parser->message();
}

/// Tokens: all bytes, and pieces that a model would write, or should not.
std::vector<std::string> vocabulary() {
    std::vector<std::string> out = {"</parameter>",
                                    "\n</parameter>",
                                    "\n</parameter>\n",
                                    "</function>",
                                    "</tool_call>",
                                    "<tool_call>",
                                    "<parameter=",
                                    "<function=",
                                    "\n<parameter",
                                    ">\n",
                                    "city>",
                                    "n>\n",
                                    "</think>",
                                    "{\"",
                                    "\":",
                                    "}}",
                                    "[1,",
                                    "],",
                                    "true",
                                    "null",
                                    "12",
                                    "get",
                                    "_weather",
                                    "\n\n",
                                    " ",
                                    "<|im_end|>",
                                    "ü",
                                    "\xF0\x9F"};
    for (int b = 1; b < 256; ++b) out.push_back(std::string(1, static_cast<char>(b)));
    return out;
}

/// What brings a call nearer to its end, the best first.
std::vector<std::string> ways_out() {
    std::vector<std::string> out = {"</function>\n</tool_call>", "\n</parameter>\n</function>\n</tool_call>",
                                    "\n</parameter>\n<parameter=", "a key", "a key of JSON"};
    for (const char* end : {"\"", "}", "]", "<parameter=", "</tool_call>", ">\n", ",", "0"})
        out.push_back(end);
    return out;
}

/// Random tokens of which each is allowed; after many of them, such as lead to an end.
std::string random_call(Random& r, std::shared_ptr<const Grammar> grammar) {
    static const std::vector<std::string> tokens = vocabulary();
    std::vector<std::string> ends = ways_out();

    GrammarMatcher m(std::move(grammar));
    std::string text;
    for (int i = 0; i < 3000 && !m.finished(); ++i) {
        const std::string* chosen = nullptr;
        if (i > 40 && r.chance(i > 400 ? 95 : 70)) {
            ends[3] = r.of(kWords) + ">\n";
            ends[4] = r.of(kWords) + "\":";
            for (const std::string& end : ends)
                if (chosen == nullptr && m.accepts(end)) chosen = &end;
        }
        for (int tries = 0; chosen == nullptr && tries < 2000; ++tries) {
            const std::string& token =
                tries < 1000 ? r.of(tokens) : tokens[static_cast<size_t>(tries) % tokens.size()];
            if (m.accepts(token)) chosen = &token;
        }
        CAPTURE(text);
        REQUIRE(chosen != nullptr);  // there is always a way on
        text += *chosen;
        m.push(*chosen);
    }
    CAPTURE(text);
    REQUIRE(m.finished());
    return text;
}

/// A text as a model may write it, with what the parser must not take for an end.
std::string random_text(Random& r) {
    static const std::vector<std::string> parts = {"x",
                                                   "\n",
                                                   " ",
                                                   "<parameter=other>",
                                                   "</parameter>!",
                                                   "</function>;",
                                                   "</tool_call> and",
                                                   "<b>",
                                                   "</",
                                                   "äö",
                                                   "<",
                                                   "=",
                                                   "\n<parameter=",
                                                   "\"quoted\"",
                                                   "</param",
                                                   "</parameter>\n</p>"};
    std::string out;
    for (size_t i = r.below(8); i > 0; --i) out += r.of(parts);
    return out;
}

ordered_json random_value(Random& r, const ordered_json& schema) {
    if (schema.contains("anyOf")) return random_value(r, schema["anyOf"][r.below(schema["anyOf"].size())]);
    if (schema.contains("enum")) return schema["enum"][r.below(schema["enum"].size())];
    const ordered_json& types = schema["type"];
    const auto type = (types.is_array() ? types[r.below(2)] : types).get<std::string>();
    if (type == "string") {
        if (!schema.contains("maxLength")) return random_text(r);
        const int low = schema["minLength"], high = schema["maxLength"];
        return std::string(static_cast<size_t>(low) + r.below(static_cast<size_t>(high - low + 1)), 'y');
    }
    if (type == "integer") return static_cast<int64_t>(r.below(2000)) - 1000;
    if (type == "number") return static_cast<double>(r.below(2000)) / 8.0;
    if (type == "boolean") return r.chance(50);
    if (type == "null") return nullptr;
    ordered_json out = type == "array" ? ordered_json::array() : ordered_json::object();
    if (type == "array") {
        for (size_t i = 1 + r.below(3); i > 0; --i) out.push_back(random_value(r, schema["items"]));
        return out;
    }
    std::vector<std::string> keys;
    for (const auto& [key, inner] : schema["properties"].items()) {
        const ordered_json& required = schema["required"];
        if (r.chance(60) || std::find(required.begin(), required.end(), key) != required.end())
            keys.push_back(key);
    }
    for (size_t i = keys.size(); i > 1; --i) std::swap(keys[i - 1], keys[r.below(i)]);
    for (const std::string& key : keys) out[key] = random_value(r, schema["properties"][key]);
    if (schema.contains("additionalProperties"))
        out["another"] = random_value(r, schema["additionalProperties"]);
    return out;
}

/// The call as the chat format writes it.
std::string written(Random& r, const std::string& name, const ordered_json& arguments) {
    const auto blank = [&] { return std::string(r.chance(70) ? "\n" : r.chance(50) ? "" : " "); };
    std::string out = blank() + "<function=" + name + ">";
    for (const auto& [key, value] : arguments.items())
        out += blank() + "<parameter=" + key + ">\n" +
               (value.is_string() ? value.get<std::string>() : value.dump()) + "\n</parameter>";
    return out + blank() + "</function>" + blank() + "</tool_call>";
}

bool accepted(const std::shared_ptr<const Grammar>& grammar, const std::string& text) {
    GrammarMatcher m(grammar);
    for (size_t at = 0; at < text.size(); at += 3) {
        const auto piece = std::string_view(text).substr(at, 3);
        if (!m.accepts(piece)) return false;
        m.push(piece);
    }
    return m.finished();
}

TEST_SUITE("cpu") {
    TEST_CASE("grammar of calls: random tokens that are allowed make calls that fit, 200 of 200") {
        int good = 0;
        for (uint64_t seed = 1; seed <= 200; ++seed) {
            Random r(seed);
            const ordered_json tools = random_tools(r);
            const auto grammar = Grammar::calls(tools, {}, false);
            const std::string text = random_call(r, grammar);
            CAPTURE(seed);
            CAPTURE(tools.dump());
            CAPTURE(text);
            const Message message = parsed(text, tools);
            CHECK(message.content.empty());
            REQUIRE(message.tool_calls.size() == 1);
            const ToolCall& call = message.tool_calls[0];
            CAPTURE(call.arguments);
            const bool fit = fits(parameters_of(tools, call.name), ordered_json::parse(call.arguments));
            CHECK(fit);
            good += fit;
        }
        CHECK(good == 200);
    }

    TEST_CASE("grammar of calls: every call that the parser reads and that fits is let through") {
        int seen = 0;
        for (uint64_t seed = 1; seed <= 2000; ++seed) {
            Random r(seed * 7919);
            const ordered_json tools = random_tools(r);
            const auto grammar = Grammar::calls(tools, {}, false);
            const std::string name = tools[r.below(3)]["function"]["name"];
            const ordered_json schema = parameters_of(tools, name);
            const ordered_json arguments = random_value(r, schema);
            const std::string text = written(r, name, arguments);
            const Message message = parsed(text, tools);
            if (message.tool_calls.size() != 1 || !message.content.empty()) continue;
            const ordered_json read = ordered_json::parse(message.tool_calls[0].arguments);
            if (read != arguments || !fits(schema, read)) continue;  // text that looks like tags
            // A text that contains </parameter> goes on only when nothing else is missing.
            if (text.find("</parameter>!") != text.npos || text.find("</parameter>\n</p>") != text.npos) {
                GrammarMatcher m(grammar);
                if (!schema["required"].empty()) continue;
            }
            ++seen;
            CAPTURE(tools.dump());
            CAPTURE(text);
            CHECK(accepted(grammar, text));
        }
        CHECK(seen > 1000);
    }

    TEST_CASE("grammar of calls: names, keys, order, and several calls") {
        const ordered_json tools = ordered_json::parse(R"([
            {"name":"S","parameters":{"type":"object","properties":{"sum":{"type":"integer"},"note":{"type":"string"}},
             "required":["sum"]}},
            {"name":"T","parameters":{"type":"object","properties":{}}},
            {"name":"U"}])");
        const std::string sum = "<parameter=sum>\n85\n</parameter>\n",
                          note = "<parameter=note>\nhi\n</parameter>\n", end = "</function>\n</tool_call>";
        const auto call = [&](const char* name, const std::string& body) {
            return std::string("\n<function=") + name + ">\n" + body + end;
        };
        const auto one = Grammar::calls(tools, {}, false), many = Grammar::calls(tools, {}, true),
                   only = Grammar::calls(tools, {"T"}, false);
        for (const std::string& good : {call("S", sum), call("S", sum + note), call("S", note + sum),
                                        call("T", ""), call("U", "<parameter=x>\ny\n</parameter>\n")})
            CHECK(accepted(one, good));
        for (const std::string& bad :
             {call("S", ""), call("S", note), call("S", sum + sum), call("X", ""), call("S", sum + "text"),
              call("S", "<parameter=sum>\n\"85\"\n</parameter>\n"),
              call("S", "<parameter=sum>\n8 5\n</parameter>\n"),
              call("S", sum + "<parameter=input>\n1\n</parameter>\n"), call("T", sum),
              call("S", sum) + "\n"}) {
            CAPTURE(bad);
            CHECK_FALSE(accepted(one, bad));
        }
        CHECK(accepted(only, call("T", "")));
        CHECK_FALSE(accepted(only, call("S", sum)));
        const std::string two = "<function=T>\n</function>\n<function=S>\n" + sum + end;
        CHECK(accepted(many, two));
        CHECK_FALSE(accepted(one, two));
        CHECK(Grammar::calls(ordered_json::array(), {}, true) == nullptr);
    }

    TEST_CASE("grammar of calls: schemas that cannot be used are accepted by their type and named") {
        const ordered_json tools =
            ordered_json::parse(R"([{"name":"f","parameters":{"type":"object","properties":{
            "a":{"type":"integer","minimum":3,"maximum":1},"b":{"$ref":"#/nowhere"},"c":{"type":"int"},
            "d":{"anyOf":[{"type":"string","pattern":"x"},{"type":"null"}]}},"dependentRequired":{}}}])");
        const auto grammar = Grammar::calls(tools, {}, true);
        const std::vector<std::string>& named = grammar->not_enforced();
        for (const char* place : {"tools.f.b", "tools.f.c", "tools.f:dependentRequired"})
            CHECK(std::find(named.begin(), named.end(), place) != named.end());
        CHECK(accepted(grammar,
                       "<function=f><parameter=c>\n3\n</parameter><parameter=b>free text</parameter>"
                       "<parameter=d>x</parameter></function></tool_call>"));
        CHECK_FALSE(
            accepted(grammar, "<function=f><parameter=c>\nthree\n</parameter></function></tool_call>"));
    }
}

}  // namespace
}  // namespace quern
