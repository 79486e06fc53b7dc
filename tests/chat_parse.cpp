// Parsing of generated text: rules one by one, any cut of the stream, values by schema, and back from render.
#include <doctest/doctest.h>

#include <ctime>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "models/python_text.h"
#include "models/qwen3_6_chat.h"
#include "models/tool_schema.h"
#include "models/utf8.h"

using nlohmann::ordered_json;
using quern::ChatDelta;
using quern::coerce_parameter;
using quern::make_qwen3_6_parser;
using quern::Message;
using quern::ParameterType;
using quern::python_json;

namespace {

const ordered_json& tools() {
    static const ordered_json value = ordered_json::parse(R"([{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
            "o": {"type": "object"}, "a": {"type": "array"}}}}}])");
    return value;
}

/// All that a parser says, as one string that a test can show: calls as [index name arguments].
struct Outcome {
    std::string reasoning, content, calls;
    std::vector<std::string> ids;
    std::map<std::string, std::string> pieces;  // of calls: their arguments, by id
    std::string writing;                        // the id of the call that had pieces last

    void add(const ChatDelta& delta) {
        reasoning += delta.reasoning;
        content += delta.content;
        for (const auto& piece : delta.call_pieces) {
            if (!piece.id.empty()) writing = piece.id;
            pieces[writing] += piece.arguments;
        }
        for (const auto& call : delta.tool_calls) {
            calls +=
                "[" + std::to_string(call.index) + " " + call.call.name + " " + call.call.arguments + "]";
            ids.push_back(call.call.id);
        }
    }
    std::string show() const { return "R:" + reasoning + "|C:" + content + "|" + calls; }
};

/// Pushes pieces of the lengths that `length` gives.
Outcome parse_cut(std::string_view text, bool thinking, const ordered_json& with_tools, bool truncated,
                  const std::function<size_t()>& length) {
    const auto parser = make_qwen3_6_parser(thinking, with_tools, 7);
    Outcome outcome;
    bool valid = true;
    while (!text.empty()) {
        const std::string_view piece = text.substr(0, length());
        const ChatDelta delta = parser->push(piece);
        valid = valid && quern::is_valid_utf8(delta.reasoning) && quern::is_valid_utf8(delta.content);
        outcome.add(delta);
        text.remove_prefix(piece.size());
    }
    outcome.add(parser->finish(truncated));
    CHECK(valid);
    const Message message = parser->message();
    CHECK(message.role == "assistant");
    CHECK(message.reasoning.has_value() == thinking);
    CHECK(message.reasoning.value_or("") == outcome.reasoning);
    CHECK(message.content == outcome.content);
    REQUIRE(message.tool_calls.size() == outcome.ids.size());
    for (size_t i = 0; i < outcome.ids.size(); ++i) {
        CHECK(message.tool_calls[i].id == outcome.ids[i]);
        CHECK(ordered_json::parse(outcome.pieces[outcome.ids[i]], nullptr, false) ==
              ordered_json::parse(message.tool_calls[i].arguments, nullptr, false));
    }
    return outcome;
}

Outcome parse(std::string_view text, bool thinking, bool truncated = false) {
    return parse_cut(text, thinking, tools(), truncated, [&] { return text.size(); });
}

std::string shown(std::string_view text, bool thinking, bool truncated = false) {
    return parse(text, thinking, truncated).show();
}

/// <tool_call> with one parameter s.
std::string call_text(const std::string& value) {
    return "<tool_call>\n<function=f>\n<parameter=s>\n" + value + "\n</parameter>\n</function>\n</tool_call>";
}

std::string call_shown(int index, const std::string& value) {
    return "[" + std::to_string(index) + " f " + python_json(ordered_json{{"s", value}}) + "]";
}

const std::vector<std::string> kPieces = {"<think>",
                                          "</think>",
                                          "<tool_call>",
                                          "</tool_call>",
                                          "<function=f>",
                                          "<function=",
                                          "</function>",
                                          "<parameter=s>",
                                          "<parameter=i>",
                                          "<parameter=",
                                          "</parameter>",
                                          "\n",
                                          "\n\n",
                                          " ",
                                          "\t",
                                          "<",
                                          ">",
                                          "</",
                                          "<tool",
                                          "<fun",
                                          "f",
                                          "12",
                                          "text",
                                          "é",
                                          "漢",
                                          "🙂",
                                          "\u3000",
                                          "\xa0",
                                          "\xe6",
                                          "\xf0\x9f",
                                          "<tool_call>\n<function=f>\n",
                                          "<parameter=s>\nv\n</parameter>\n",
                                          "</function>\n</tool_call>",
                                          "a < b"};

std::string random_text(std::mt19937& random, int most) {
    std::string text;
    for (int n = static_cast<int>(random() % static_cast<unsigned>(most)); n > 0; --n)
        text += kPieces[random() % kPieces.size()];
    return text;
}

double seconds_for(std::string_view text, bool thinking, size_t piece) {
    const std::clock_t start = std::clock();  // of this process: others may be busy, too
    const auto parser = make_qwen3_6_parser(thinking, tools(), 1);
    size_t given = 0;
    for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(std::min(piece, rest.size()))) {
        const ChatDelta delta = parser->push(rest.substr(0, piece));
        given += delta.content.size() + delta.reasoning.size();
    }
    const ChatDelta delta = parser->finish();
    given += delta.content.size() + delta.reasoning.size();
    for (const auto& call : parser->message().tool_calls) given += call.arguments.size();
    CHECK(given > 0);
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("parse: thinking") {
        CHECK(shown("why\n</think>\n\nAnswer", true) == "R:why|C:Answer|");
        CHECK(shown(" \n<think>\nwhy </think> A", true) == "R:why|C:A|");
        CHECK(shown("why\n\nnot\n", true) == "R:why\n\nnot|C:|");
        CHECK(shown("", true) == "R:|C:|");
        CHECK(shown("</think>A\n", true) == "R:|C:A|");
        CHECK(shown("a</think>b</think>c", true) == "R:a|C:b</think>c|");
        CHECK(shown("<think>a</think>b", false) == "R:|C:<think>a</think>b|");
        CHECK(shown(" everything is content \n", false) == "R:|C: everything is content|");
        CHECK(shown("a </thin", true) == "R:a </thin|C:|");
        CHECK(shown("a <think> b < c</think>d", true) == "R:a <think> b < c|C:d|");
        CHECK(shown("a\u3000\n</think>\u3000b", true) == "R:a|C:b|");
        const auto parser = make_qwen3_6_parser(true, nullptr);
        CHECK(parser->in_reasoning());
        CHECK(parser->push("x</think").reasoning == "x");
        CHECK(parser->in_reasoning());
        parser->push(">");
        CHECK_FALSE(parser->in_reasoning());
    }

    TEST_CASE("parse: text is given out as soon as it is decided") {
        const auto parser = make_qwen3_6_parser(true, tools());
        CHECK(parser->push("a b").reasoning == "a b");
        CHECK(parser->push(" \n").reasoning.empty());
        CHECK(parser->push("c<").reasoning == " \nc");
        CHECK(parser->push("/think>\n\nx ").content == "x");
        CHECK(parser->push("<tool_call>").empty());
        CHECK(parser->push("no").content == " <tool_call>no");
        CHECK(parser->push("\xe6\xbc").empty());
        CHECK(parser->push("\xa2").content == "漢");
        const ChatDelta begun = parser->push("<tool_call><function=f><parameter=i>4</parameter>");
        CHECK((begun.content.empty() && begun.tool_calls.empty()));
        const ChatDelta delta = parser->push("</function>");
        REQUIRE(delta.tool_calls.size() == 1);
        CHECK(delta.tool_calls[0].call.name == "f");
        CHECK(delta.tool_calls[0].call.arguments == R"({"i": 4})");
        CHECK(delta.tool_calls[0].call.id.starts_with("call_"));
    }

    TEST_CASE("parse: calls") {
        CHECK(shown(call_text("v"), false) == "R:|C:|" + call_shown(0, "v"));
        CHECK(shown("t\n</think>\n\nLook:\n\n" + call_text("v") + "\n" + call_text("w") + "\n", true) ==
              "R:t|C:Look:|" + call_shown(0, "v") + call_shown(1, "w"));
        CHECK(shown("<tool_call><function=f></function></tool_call>", false) == "R:|C:|[0 f {}]");
        CHECK(shown("<tool_call><function= f ><parameter= s >v</parameter></function></tool_call>", false) ==
              "R:|C:|" + call_shown(0, "v"));
        CHECK(shown("<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>",
                    false) == "R:|C:|[0 f {}][1 g {}]");
        CHECK(shown("A\n\n" + call_text("v") + "\n\nB\n", false) == "R:|C:A\n\nB|" + call_shown(0, "v"));
        CHECK(shown(call_text("v") + "\n\nB", false) == "R:|C:B|" + call_shown(0, "v"));
        CHECK(shown("<tool_call><function=f><parameter=i>1</parameter><parameter=s>a</parameter>"
                    "<parameter=i>2</parameter></function></tool_call>",
                    false) == "R:|C:|[0 f {\"i\": 2, \"s\": \"a\"}]");
        CHECK(shown("<tool_call><function=unknown><parameter=\"q\">1</parameter></function></tool_call>",
                    false) == R"(R:|C:|[0 unknown {"\"q\"": "1"}])");
        const Outcome two = parse(call_text("v") + call_text("v"), false);
        REQUIRE(two.ids.size() == 2);
        CHECK(two.ids[0] != two.ids[1]);
    }

    TEST_CASE("parse: a call is given out piece by piece, its text unquoted too") {
        const auto parser = make_qwen3_6_parser(false, tools(), 7);
        CHECK(parser->push("<tool_call>\n<function=f>\n").call_pieces.empty());
        auto first = parser->push("<parameter=s>\none \"two\"\n").call_pieces;
        REQUIRE(first.size() == 1);
        CHECK(first[0].name == "f");
        CHECK(first[0].arguments == R"({"s": "one \"two\")");
        CHECK(first[0].text == "one \"two\"");
        const auto more = parser->push("three").call_pieces;
        REQUIRE(more.size() == 1);
        CHECK(more[0].id.empty());
        CHECK(more[0].text == "\nthree");
        const auto last =
            parser->push("\n</parameter>\n<parameter=i>\n7\n</parameter>\n</function>\n</tool_call>");
        REQUIRE(last.call_pieces.size() == 1);
        CHECK(last.call_pieces[0].arguments == R"(", "i": 7})");
        REQUIRE(last.tool_calls.size() == 1);
        CHECK(last.tool_calls[0].call.id == first[0].id);
        CHECK(last.tool_calls[0].call.arguments == R"({"s": "one \"two\"\nthree", "i": 7})");
    }

    TEST_CASE("parse: without tools there are no calls") {
        const std::string text = "a </think>" + call_text("v") + " ";
        for (const ordered_json& none : {ordered_json(), ordered_json::array()}) {
            const auto parser = make_qwen3_6_parser(true, none);
            parser->push(text);
            parser->finish();
            CHECK(parser->message().content == call_text("v"));
        }
    }

    TEST_CASE("parse: a call ends thinking that was not ended") {
        CHECK(shown("hm\n" + call_text("v"), true) == "R:hm|C:|" + call_shown(0, "v"));
        CHECK(shown("hm " + call_text("v") + "\n</think>\n\nB", true) == "R:hm|C:B|" + call_shown(0, "v"));
        CHECK(shown("a <tool_call> b </think>c", true) == "R:a <tool_call> b|C:c|");
        CHECK(shown("use <tool_call>\n<function=f> like so</think>c", true) ==
              "R:use <tool_call>\n<function=f> like so|C:c|");
        const std::string open = "<tool_call>\n<function=f>\n<parameter=s>\nno, wait";
        CHECK(shown(open + "\n</think>\n\nc", true) == "R:" + open + "|C:c|");
    }

    TEST_CASE("parse: values are cut where the format ends them, whatever they talk of") {
        const std::vector<std::string> values = {"",
                                                 "\n",
                                                 "\n\n",
                                                 " a ",
                                                 "line\n\nline",
                                                 "<b>&amp;</b>",
                                                 "a </parameter> b",
                                                 "</parameter>",
                                                 "x\n</parameter>\n<parameter name=\"y\">",
                                                 "</function>",
                                                 "</function>\n</tool_call",
                                                 "</tool_call>",
                                                 "if a < b and c > d:",
                                                 "<tool_call>",
                                                 "see <parameter=s> inline",
                                                 "<parameter=",
                                                 "\n<parameter=\n>",
                                                 "</function>\nmore\n</function> end",
                                                 "<function=g>",
                                                 "<think></think>",
                                                 "</tool_call> <b>"};
        for (const std::string& value : values)
            CHECK(shown(call_text(value), false) == "R:|C:|" + call_shown(0, value));
    }

    TEST_CASE("parse: missing end tags are forgiven at the end, unless a limit made the end") {
        const std::string full = call_text("v");
        for (const char* last : {"\n</tool_call>", "</function>", "\n</function>"}) {
            const std::string text = "A " + full.substr(0, full.find(last));
            CAPTURE(text);
            CHECK(shown(text, false) == "R:|C:A|" + call_shown(0, "v"));
            const bool closed = text.find("</function>") != std::string::npos;
            CHECK(shown(text, false, true) ==
                  (closed ? "R:|C:A|" + call_shown(0, "v")
                          : "R:|C:" + std::string(quern::python_rstrip(text)) + "|"));
        }
        CHECK(shown("<tool_call><function=f><parameter=i>1\n</tool_call>", false) ==
              "R:|C:|[0 f {\"i\": 1}]");
        CHECK(shown("<tool_call><function=f><parameter=i>1\n</function></tool_call>", false) ==
              "R:|C:|[0 f {\"i\": 1}]");
        CHECK(shown("<tool_call><function=f><parameter=i>1\n<parameter=s>\nx\n</parameter></function></"
                    "tool_call>",
                    false) == "R:|C:|[0 f {\"i\": 1, \"s\": \"x\"}]");
        CHECK(shown("<tool_call><function=f><parameter=s>x</parameter></tool_call>" + call_text("v"),
                    false) == "R:|C:|" + call_shown(0, "x") + call_shown(1, "v"));
        CHECK(shown("<tool_call><function=f><parameter=s>x\n</tool_call>\n" + call_text("v"), false) ==
              "R:|C:|" + call_shown(0, "x") + call_shown(1, "v"));
    }

    TEST_CASE("parse: what is no call stays text, all of it") {
        for (const char* text :
             {"<tool_call>", "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "a <tool_call>\n<functional>",
              "<tool_call><function=>", "<tool_call><function=f\n>", "<tool_call><function=f>junk</function>",
              "<tool_call><function=f", "<tool_call><function=f><parameter=s",
              "<tool_call><function=f><parameter=>x", "<function=f></function>", "</tool_call>",
              "<tool_call><function=f<parameter=s>", "<", "</", "a<tool_cal"})
            CHECK(shown(text, false) == std::string("R:|C:") + text + "|");
        CHECK(shown("<tool_call>\n<function=f>\nbad\n\n" + call_text("v"), false) ==
              "R:|C:<tool_call>\n<function=f>\nbad|" + call_shown(0, "v"));
        CHECK(shown("a\xff\xe6z", false) == "R:|C:a\ufffd\ufffdz|");
        CHECK(shown("a\xe6", true) == "R:a\ufffd|C:|");
    }

    TEST_CASE("parse: any cut of the stream gives the same result, and no character is lost [seed 11]") {
        std::mt19937 random(11);
        for (int round = 0; round < 6000; ++round) {
            const std::string text = random_text(random, 24);
            const bool thinking = random() % 2, truncated = random() % 2;
            const ordered_json none;
            const ordered_json& with = random() % 5 ? tools() : none;
            const std::string whole =
                parse_cut(text, thinking, with, truncated, [&] { return text.size(); }).show();
            const std::string bytes = parse_cut(text, thinking, with, truncated, [] { return 1; }).show();
            const std::string mixed =
                parse_cut(text, thinking, with, truncated, [&] { return 1 + random() % 7; }).show();
            if (bytes == whole && mixed == whole) continue;
            FAIL_CHECK("cut matters for: ", text, "\nwhole: ", whole, "\nbytes: ", bytes, "\nmixed: ", mixed);
        }
    }

    TEST_CASE("parse: without calls the text is kept but for tags and space [seed 12]") {
        const auto letters = [](const std::string& text) {
            std::string out;
            for (char c : text)
                if (!isspace(static_cast<unsigned char>(c))) out += c;
            return out;
        };
        std::mt19937 random(12);
        int without_calls = 0;
        for (int round = 0; round < 4000; ++round) {
            std::string text, valid;
            text = random_text(random, 12);
            quern::append_utf8_lossy(valid, text);
            const Outcome outcome = parse(text, false);
            if (!outcome.calls.empty()) continue;
            ++without_calls;
            CHECK(letters(outcome.content) == letters(std::string(quern::python_rstrip(valid))));
        }
        CHECK(without_calls > 2000);
    }

    TEST_CASE("parse: what render writes comes back [seed 13]") {
        const std::vector<std::string> words = {"a",    "Hello",       "\n", " ", "<b>",
                                                "漢",   "</function>", "{}", "5", "<parameter=s>",
                                                "true", "null",        "'",  "\\"};
        std::mt19937 random(13);
        const auto words_of = [&](unsigned most) {
            std::string text;
            for (unsigned n = random() % most; n > 0; --n) text += words[random() % words.size()];
            return text;
        };
        for (int round = 0; round < 2000; ++round) {
            Message turn{"assistant", words_of(5), words_of(5), {}, {}};
            for (unsigned n = random() % 3; n > 0; --n) {
                ordered_json arguments = ordered_json::object();
                if (random() % 2) arguments["i"] = static_cast<int>(random() % 2000) - 1000;
                if (random() % 2) arguments["s"] = words_of(6);
                if (random() % 2) arguments["b"] = random() % 2 == 0;
                if (random() % 2) arguments["a"] = {1, words_of(3), nullptr, {{"k", 0.5}}};
                if (random() % 2) arguments["n"] = 0.25;
                turn.tool_calls.push_back({"", "f", python_json(arguments)});
            }
            const std::vector<Message> messages = {{"user", "q", {}, {}, {}}, turn};
            const auto prompt = quern::render_qwen3_6_chat(std::span(messages).first(1), tools(), {});
            const auto all = quern::render_qwen3_6_chat(messages, tools(), {.add_generation_prompt = false});
            std::string text = all.text().substr(prompt.text().size());
            text.resize(text.size() - std::string("<|im_end|>\n").size());
            const auto parser = make_qwen3_6_parser(prompt.thinking_open, tools());
            parser->push(text);
            parser->finish();
            const Message back = parser->message();
            CAPTURE(text);
            CHECK(*back.reasoning == quern::python_strip(*turn.reasoning));
            CHECK(back.content == quern::python_strip(turn.content));
            REQUIRE(back.tool_calls.size() == turn.tool_calls.size());
            for (size_t i = 0; i < back.tool_calls.size(); ++i)
                CHECK(back.tool_calls[i].arguments == turn.tool_calls[i].arguments);
        }
    }

    TEST_CASE("parse: time is linear on hostile text, whole and in bytes" * doctest::test_suite("slow")) {
        constexpr size_t kBytes = 1 << 20;
        for (const char* unit :
             {"<", "<tool_call>", "<tool_call>\n<function=f>", "<tool_call><function=f><parameter=s>", " ",
              "\n", "</parameter>", "</parameter> ", "<tool_call><function=f></function>",
              "<tool_call><function=", "<think>", "<tool_call><function=f><parameter=s>\n</function> ",
              "</think>", "\xf0\x9f", "<parameter=s>\n", "<\xe6"}) {
            std::string text;
            while (text.size() < kBytes) text += unit;
            CAPTURE(unit);
            CHECK(seconds_for(text + "x", true, kBytes) < 4);  // some 0.1; 2 under sanitizers
            CHECK(seconds_for(text + "x", false, 4096) < 4);
        }
        const std::string value = "<tool_call><function=f><parameter=s>" + std::string(kBytes, ' ') +
                                  "</parameter>" + std::string(kBytes, '\n') + "x";
        CHECK(seconds_for(value, false, 1) < 15);  // sanitizers included; quadratic time would be a minute
    }

    TEST_CASE("parse: values by type") {
        using enum ParameterType;
        const std::vector<std::tuple<ParameterType, std::string, std::string>> cases = {
            {string, "5", R"("5")"},
            {string, "null", R"("null")"},
            {string, " a\n", R"(" a\n")"},
            {integer, "5", "5"},
            {integer, " -7 ", "-7"},
            {integer, "+3", "3"},
            {integer, "007", "7"},
            {integer, "-0", "0"},
            {integer, "2.0", "2"},
            {integer, "123456789012345678901234567890", "123456789012345678901234567890"},
            {integer, "five", R"("five")"},
            {integer, "", R"("")"},
            {integer, "None", "null"},
            {number, "1.5", "1.5"},
            {number, "2.0", "2"},
            {number, "1e3", "1000"},
            {number, "1e-7", "1e-07"},
            {number, "1e300", "1e+300"},
            {number, "nan", R"("nan")"},
            {number, "1e999", R"("1e999")"},
            {number, "1.5x", R"("1.5x")"},
            {number, "--1", R"("--1")"},
            {number, "NULL", "null"},
            {boolean, "true", "true"},
            {boolean, "True", "true"},
            {boolean, "FALSE", "false"},
            {boolean, "yes", "false"},
            {boolean, "none", "null"},
            {container, R"({"b": [1,2.0], "a": "x"})", R"({"b": [1, 2.0], "a": "x"})"},
            {container, "{'a': True, 'b': None}", R"({"a": true, "b": null})"},
            {container, "[1", R"("[1")"},
            {container, "null", "null"},
            {container, "plain", R"("plain")"},
            {container, "[]", "[]"},
            {ParameterType::null, "x", R"("x")"},
            {ParameterType::null, "null", "null"}};
        for (const auto& [type, text, json] : cases) {
            const auto& this_text = text;
            CAPTURE(this_text);
            CHECK(coerce_parameter(text, type) == json);
            CHECK(ordered_json::accept(json));
        }
        const std::string deep(1 << 20, '[');
        CHECK(coerce_parameter(deep, container) == "\"" + deep + "\"");
    }

    TEST_CASE("parse: types of parameters from all kinds of schemas") {
        using enum ParameterType;
        const ordered_json schemas = ordered_json::parse(R"([1, null, {"name": 5}, {"function": []},
          {"type": "function", "function": {"name": "t", "parameters": {"$defs": {"D": {"type": "object"}, "L": {"$ref": "#/$defs/L"}},
            "properties": {"list": {"type": ["null", "integer"]}, "any": {"anyOf": [{"type": "null"}, {"type": "number"}]},
              "one": {"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "ref": {"$ref": "#/$defs/D"}, "loop": {"$ref": "#/$defs/L"},
              "gone": {"$ref": "#/$defs/X"}, "bare": {"properties": {}}, "items": {"items": {}}, "none": {}, "odd": 7,
              "weird": {"type": 3}, "null": {"type": "null"}, "enum": {"enum": ["a"]}, "date": {"type": "date"}}}}},
          {"name": "flat", "parameters": {"properties": {"x": {"type": "array"}}}},
          {"name": "flat", "parameters": {"properties": {"x": {"type": "integer"}}}},
          {"name": "bad", "parameters": {"properties": [1]}}])");
        const quern::ToolSchemas types(schemas);
        CHECK(types.any());
        const std::vector<std::pair<const char*, ParameterType>> expected = {
            {"list", integer}, {"any", number},  {"one", boolean},    {"ref", container},
            {"loop", string},  {"gone", string}, {"bare", container}, {"items", container},
            {"none", string},  {"odd", string},  {"weird", string},   {"null", ParameterType::null},
            {"enum", string},  {"date", string}, {"missing", string}};
        for (const auto& [name, type] : expected) {
            const auto& this_name = name;
            CAPTURE(this_name);
            CHECK(types.type("t", name) == type);
        }
        CHECK(types.type("flat", "x") == container);
        CHECK(types.type("nobody", "x") == string);
        CHECK_FALSE(quern::ToolSchemas(ordered_json::object()).any());
    }
}
