// Flags: normalisation, environment, numbers and what a typo meant.
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"

#include <doctest/doctest.h>
#include "ggml-like/error.h"

#include <string>
#include <vector>

using namespace quern;
using Strings = std::vector<std::string>;

namespace {

struct Seen {
    std::string prompt, layers, count, model;
    Strings biases;
    bool stats = true;
    bool raw = false;
};

ArgParser make_parser(Seen& seen) {
    ArgParser parser("test", "a test", "[MODEL]");
    parser.value("-p,--prompt", "TEXT", "prompt", [&](const std::string& v) { seen.prompt = v; });
    parser.value("-ngl,--gpu-layers", "N", "layers", [&](const std::string& v) { seen.layers = v; });
    parser.value("-n,--predict,--n-predict", "N", "count", [&](const std::string& v) { seen.count = v; });
    parser.value("-m", "PATH", "model", [&](const std::string& v) { seen.model = v; });
    parser.values("--logit-bias", "ID", "bias", [&](const std::string& v) { seen.biases.push_back(v); });
    parser.toggle("--stats,!--no-stats", "stats", [&](bool v) { seen.stats = v; });
    parser.toggle("--raw,-no-cnv", "raw", [&](bool v) { seen.raw = v; });
    parser.ignored("-fa,--flash-attn", "flash", {"on", "off", "auto"});
    parser.positional("MODEL", "model", [&](const std::string& v) { seen.model = v; });
    return parser;
}

Seen parse(const Strings& args) {
    Seen seen;
    ArgParser parser = make_parser(seen);
    parser.apply(parser.normalise(args));
    return seen;
}

std::string error_of(const Strings& args) {
    try {
        parse(args);
    } catch (const Error& error) {
        CHECK_EQ(error.exit_code(), 2);
        return error.what();
    }
    return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("cli: every spelling of a flag reaches the same place") {
        CHECK_EQ(parse({"-ngl", "99"}).layers, "99");
        CHECK_EQ(parse({"-ngl=99"}).layers, "99");
        CHECK_EQ(parse({"--gpu-layers", "all"}).layers, "all");
        CHECK_EQ(parse({"--gpu-layers=all"}).layers, "all");
        CHECK_EQ(parse({"-p=hi"}).prompt, "hi");
        CHECK_EQ(parse({"-p="}).prompt, "");
        CHECK_EQ(parse({"-n128"}).count, "128");
        CHECK_EQ(parse({"-n-1"}).count, "-1");
        CHECK_EQ(parse({"--n-predict", "-1"}).count, "-1");
        CHECK_EQ(parse({"some/dir"}).model, "some/dir");
        CHECK_EQ(parse({"-m", "some/dir"}).model, "some/dir");
        CHECK_EQ(parse({"--", "-dir"}).model, "-dir");
        CHECK(parse({"-no-cnv"}).raw);
    }

    TEST_CASE("cli: values are never looked into") {
        for (const char* text : {"[x]", "-5 apples", "--help me", "-ngl", "--", "--stats=false", "a,b", "%d",
                                 "", "-", "=", "\"quoted\"", "{\"a\":[1]}", "--prompt"}) {
            CAPTURE(text);
            CHECK_EQ(parse({"-p", text}).prompt, text);
            CHECK_EQ(parse({"--logit-bias", text, "--logit-bias=x"}).biases, Strings{text, "x"});
        }
    }

    TEST_CASE("cli: the last of repeated flags wins, lists keep all") {
        CHECK_EQ(parse({"-p", "one", "--prompt=two", "-p", "three"}).prompt, "three");
        CHECK_FALSE(parse({"--stats", "--no-stats"}).stats);
        CHECK(parse({"--no-stats", "--stats"}).stats);
        CHECK_FALSE(parse({"--stats=off"}).stats);
        CHECK_EQ(parse({"--logit-bias", "1+2", "--logit-bias", "3-4"}).biases, Strings{"1+2", "3-4"});
    }

    TEST_CASE("cli: ignored flags take only the values they know") {
        CHECK_EQ(parse({"-fa", "on", "dir"}).model, "dir");
        CHECK_EQ(parse({"-fa", "dir"}).model, "dir");
        CHECK_EQ(parse({"-fa=auto", "dir"}).model, "dir");
    }

    TEST_CASE("cli: mistakes name the flag and the nearest one") {
        CHECK(has(error_of({"--promt", "x"}), "did you mean '--prompt'?"));
        CHECK(has(error_of({"-ng", "1"}), "did you mean '-ngl'?"));
        CHECK(has(error_of({"--gpu-layer=1"}), "did you mean '--gpu-layers'?"));
        CHECK_FALSE(has(error_of({"--xyzzy"}), "did you mean"));
        CHECK(has(error_of({"-p"}), "-p needs a value"));
        CHECK(has(error_of({"a", "b"}), "unexpected argument 'b'"));
        CHECK(has(error_of({"--stats=maybe"}), "expected on or off"));
        CHECK_FALSE(has(error_of({"--bad\x1b[31m"}), "\x1b"));
        CHECK_FALSE(error_of({std::string(100000, '-')}).empty());
    }

    TEST_CASE("cli: the environment comes first and unknown names are reported") {
        Seen seen;
        ArgParser parser = make_parser(seen);
        Strings warnings;
        Strings all = parser.from_environment(
            {"QUERN_ARG_PROMPT=from env", "QUERN_ARG_GPU_LAYERS=7", "QUERN_ARG_STATS=0", "QUERN_ARG_PROMTP=x",
             "HOME=/", "QUERN_ARG_PORT=1", "QUERN_ARG_FLASH_ATTN=on"},
            &warnings);
        for (const std::string& arg : parser.normalise({"-p", "from line"})) all.push_back(arg);
        parser.apply(all);
        CHECK_EQ(seen.prompt, "from line");
        CHECK_EQ(seen.layers, "7");
        CHECK_FALSE(seen.stats);
        REQUIRE_EQ(warnings.size(), 1);
        CHECK(has(warnings[0], "QUERN_ARG_PROMTP"));
        CHECK(has(warnings[0], "did you mean 'QUERN_ARG_PROMPT'?"));
    }

    TEST_CASE("cli: help shows llama.cpp's spelling") {
        Seen seen;
        const std::string help = make_parser(seen).help();
        CHECK(has(help, "-ngl, --gpu-layers N"));
        CHECK(has(help, "--stats, --no-stats"));
        ArgParser wordy("wordy", "a test", "[FLAGS]");
        std::string words;
        for (int i = 0; i < 100; ++i) words += "word ";
        wordy.ignored("--words", words + "end", {});
        wordy.footer("The last line.\n");
        const std::string wrapped = wordy.help();
        CHECK_FALSE(has(wrapped, " \n"));
        CHECK(has(wrapped, "end\n\n  -h, --help "));  // not part of the last section
        CHECK(wrapped.ends_with("\n\nThe last line.\n"));
        CHECK_EQ(make_parser(seen).normalise({"-p", "x", "-h"}), Strings{"--help"});
        CHECK_EQ(make_parser(seen).normalise({"-p", "-h"}).back(), "-h");
    }

    TEST_CASE("cli: whole numbers") {
        CHECK_EQ(parse_integer("0", "n"), 0);
        CHECK_EQ(parse_integer("-12", "n"), -12);
        CHECK_EQ(parse_integer("+12", "n"), 12);
        CHECK_EQ(parse_integer("32k", "n"), 32000);
        CHECK_EQ(parse_integer("32Ki", "n"), 32768);
        CHECK_EQ(parse_integer("2M", "n"), 2000000);
        CHECK_EQ(parse_integer("1Mi", "n"), 1048576);
        CHECK_EQ(parse_integer("9223372036854775807", "n"), INT64_MAX);
        for (const char* bad : {"", " 1", "1 ", "1.5", "k", "-", "+", "+-1", "1kk", "1KI", "nan", "inf",
                                "0x10", "9223372036854775808", "9223372036854775807k", "1e3", "\xff"}) {
            CAPTURE(bad);
            CHECK_THROWS_AS(parse_integer(bad, "n"), Error);
        }
        CHECK_THROWS_WITH_AS(parse_integer("7", "-n", 0, 5), doctest::Contains("from 0 to 5"), Error);
    }

    TEST_CASE("cli: decimal numbers") {
        CHECK_EQ(parse_number("0.7", "t", 0, 2), doctest::Approx(0.7));
        CHECK_EQ(parse_number("-1e-3", "t", -1, 1), doctest::Approx(-0.001));
        CHECK_EQ(parse_number(".5", "t", 0, 1), doctest::Approx(0.5));
        for (const char* bad :
             {"", "nan", "NaN", "inf", "-inf", "1e400", "0,7", "0.7x", " 1", "3", "1.0.0"}) {
            CAPTURE(bad);
            CHECK_THROWS_AS(parse_number(bad, "t", 0, 2), Error);
        }
    }

    TEST_CASE("cli: nearest match") {
        const Strings names = {"--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty"};
        CHECK_EQ(nearest_match("--tmep", names), "--temp");
        CHECK_EQ(nearest_match("--topk", names), "--top-k");
        CHECK_EQ(nearest_match("--repeat", names), "--repeat-penalty");
        CHECK_EQ(nearest_match("--port", names), "");
        CHECK_EQ(nearest_match("", names), "");
        CHECK_EQ(nearest_match(std::string(1 << 20, 'a'), names), "");
    }

    TEST_CASE("cli: UTF-8 and printable text") {
        CHECK(is_utf8("plain \xC3\xA4 \xE2\x82\xAC \xF0\x9F\x99\x82"));
        size_t offset = 0;
        CHECK_FALSE(is_utf8("ab\xC3", &offset));
        CHECK_EQ(offset, 2);
        for (const char* bad : {"\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
                                "\xF4\x90\x80\x80", "\xFF", "\x80", "\xF0\x9F\x99"}) {
            CHECK_FALSE(is_utf8(bad));
        }
        CHECK_EQ(printable("a\x1b[0m\xC2\x9B\xFF\n\xC3\xA4"), "a?[0m???\xC3\xA4");
        CHECK_EQ(printable(std::string(200, 'x'), 10), "xxxxxxxxxx...");
        CHECK_EQ(printable_lines("", 100), "");
        CHECK_EQ(printable_lines("one", 100), "one");
        CHECK_EQ(printable_lines("a\x1b:\n  b\nc\n\nd", 100), "a?:\n  b\n  c\n  \n  d");
        CHECK_EQ(printable_lines("12345\n67890\nx", 10), "12345\n  67...\n  ...");
        CHECK_EQ(printable_lines("123456789\nx", 10), "123456789\n  ...");
    }
}
