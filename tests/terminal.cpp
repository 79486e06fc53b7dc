// Filtering of model output for terminals: what goes, what stays, and that cuts in the stream do not matter.
#include "tools/run/escape_filter.h"

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

using quern::EscapeFilter;

namespace {

std::string whole(const std::string& text) {
    EscapeFilter filter;
    return filter.push(text);
}

std::string in_pieces(const std::string& text, size_t piece) {
    EscapeFilter filter;
    std::string out;
    for (size_t i = 0; i < text.size(); i += piece) out += filter.push(text.substr(i, piece));
    return out;
}

const std::vector<std::pair<std::string, std::string>> kCases = {
    {"plain\ttext\nnext", "plain\ttext\nnext"},
    {"\x1b[31mred\x1b[0m", "red"},
    {"\x1b[?2004h\x1b[1;31;48;5;200mx", "x"},
    {"a\x1b]0;title\x07z", "az"},
    {"a\x1b]52;c;Zm9v\x1b\\z", "az"},
    {"a\x1bP1;2q#0;1\x1b\\z", "az"},
    {"a\xC2\x9B"
     "31mz",
     "az"},
    {"a\xC2\x9D"
     "0;t\xC2\x9Cz",
     "az"},
    {"a\xC2\x85z\xC2\xA0\xC2\xA9", "az\xC2\xA0\xC2\xA9"},
    {"bell\x07 back\x08space\rreturn\x7F"
     "del",
     "bell backspacereturndel"},
    {"\x1b(B\x1b=\x1b"
     "7x",
     "x"},
    {"\x1b\x1b[0mx", "x"},
    {"\x1b]unfinished title\nnext line", "\nnext line"},
    {"\x1b[12", ""},
    {"\x1b", ""},
    {"end \xC2", "end "},
    {"\x1b[3\nm", "\nm"},
    {"gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x99\x82", "gr\xC3\xBC\xC3\x9F \xE2\x82\xAC \xF0\x9F\x99\x82"},
    {std::string("nul\0nul", 7), "nulnul"},
};

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("terminal: controls and escape sequences go, text stays") {
        for (const auto& [text, expected] : kCases) {
            const auto& this_text = text;
            CAPTURE(this_text);
            CHECK_EQ(whole(text), expected);
        }
    }

    TEST_CASE("terminal: any cut of the stream gives the same") {
        for (const auto& [text, expected] : kCases) {
            for (size_t piece = 1; piece <= 4; ++piece) CHECK_EQ(in_pieces(text, piece), expected);
        }
        std::mt19937 random(7);
        const std::string alphabet = "\x1b\x1b[]P\\\x07\n;1am\xC2\x9B\x9C\x9D\xC3\xA4 (";
        for (int round = 0; round < 2000; ++round) {
            std::string text;
            for (int i = 0; i < 24; ++i) text += alphabet[random() % alphabet.size()];
            const std::string expected = whole(text);
            for (size_t piece : {1, 2, 3, 5}) REQUIRE_EQ(in_pieces(text, piece), expected);
            REQUIRE_EQ(expected.find('\x1b'), std::string::npos);
            REQUIRE_EQ(expected.find("\xC2\x9B"), std::string::npos);
            REQUIRE_EQ(expected.find('\x07'), std::string::npos);
        }
    }

    TEST_CASE("terminal: a sequence without end hides only a little") {
        const std::string tail(1000, 'x');
        CHECK_GT(whole("\x1b]0;" + tail).size(), 500u);
        CHECK_GT(whole("\x1b[" + std::string(1000, '1')).size(), 500u);
        CHECK_GT(whole("\x1bP" + tail).size(), 500u);
    }

    TEST_CASE("terminal: the filter is as new after reset") {
        EscapeFilter filter;
        filter.push("\x1b]0;open");
        filter.reset();
        CHECK_EQ(filter.push("text"), "text");
    }
}
