// What an answer looks like on a terminal: width of text, borders of characters, lines broken between words, Markdown.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "tools/run/completion.h"
#include "tools/run/markdown_style.h"
#include "tools/run/pasted.h"
#include "tools/run/text_width.h"
#include "tools/run/word_wrap.h"

using namespace quern;

namespace {

template <typename Filter>
std::string in_pieces(Filter filter, const std::string& text, size_t piece) {
    std::string out;
    for (size_t i = 0; i < text.size(); i += piece) out += filter.push(text.substr(i, piece));
    return out + filter.finish();
}

std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> out(1);
    for (const char c : text) {
        if (c == '\n')
            out.emplace_back();
        else
            out.back() += c;
    }
    return out;
}

std::string without_blanks(const std::string& text) {
    std::string out;
    for (const char c : text)
        if (c != ' ' && c != '\n') out += c;
    return out;
}

std::string without_colors(std::string text) {
    for (size_t at; (at = text.find("\033[")) != std::string::npos;)
        text.erase(at, text.find('m', at) + 1 - at);
    return text;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("text width: cells of scripts, marks, emoji and flags") {
        // Expected: East Asian Width (UAX #11) and what terminals do with emoji sequences.
        const std::vector<std::pair<std::string, int>> cases = {{"", 0},
                                                                {"abc", 3},
                                                                {"g\xC3\xBC\xC3\x9F", 3},
                                                                {"e\xCC\x81", 1},
                                                                {"日本", 4},
                                                                {"한국", 4},
                                                                {"\033[1mab\033[0m", 2},
                                                                {"👍", 2},
                                                                {"🇩🇪", 2},
                                                                {"👨‍👩‍👧", 2},
                                                                {"❤️", 2},
                                                                {"नि", 1}};
        for (const auto& [text, width] : cases) {
            const auto& this_text = text;
            CAPTURE(this_text);
            CHECK(text_width(text) == width);
        }
    }

    TEST_CASE("graphemes: the cursor steps over whole characters") {
        const std::wstring text =
            L"a\U0001F1E9\U0001F1EA\U0001F1EB\U0001F1F7e\u0301\U0001F468\u200D\U0001F469z";
        const std::vector<size_t> borders = {0, 1, 3, 5, 7, 10, 11};
        for (size_t i = 0; i + 1 < borders.size(); ++i) {
            CHECK(next_grapheme(text, borders[i]) == borders[i + 1]);
            CHECK(previous_grapheme(text, borders[i + 1]) == borders[i]);
        }
        CHECK(next_grapheme(text, 11) == 11);
        CHECK(previous_grapheme(text, 0) == 0);
    }

    TEST_CASE("word wrap: the width may change within a line") {
        WordWrap wrap(30);
        std::string out = wrap.push("- one two three four ");
        wrap.resize(12);
        out += wrap.push("five six seven ");
        wrap.resize(0);  // a terminal that does not say
        wrap.resize(40);
        out += wrap.push("eight nine ten");
        out += wrap.finish();
        CHECK(out == "- one two three four\n  five six\n  seven eight nine ten");
        WordWrap off(0);
        off.resize(5);
        CHECK(off.push("as it is") == "as it is");
    }

    TEST_CASE("word wrap: lines fit, words stay whole, nothing is lost") {
        CHECK(wrap_text("one two three four", 9) == "one two\nthree\nfour");
        CHECK(wrap_text("one two\n\nthree", 40) == "one two\n\nthree");
        CHECK(wrap_text("- first item of it\n  more of the item", 10) ==
              "- first\n  item of\n  it\n  more of\n  the item");
        CHECK(wrap_text("```\nlong line of code here\n```\nlong line of text", 10) ==
              "```\nlong line of code here\n```\nlong line\nof text");
        CHECK(wrap_text("今日は天気が良い。", 8) == "今日は天\n気が良\nい。");
        CHECK(wrap_text("a word\033[1m bold\033[0m here", 11) == "a word\033[1m bold\033[0m\nhere");
        CHECK(wrap_text("as it is", 0) == "as it is");
        CHECK(wrap_text("name      what it does for you", 20, 10) ==
              "name      what it\n          does for\n          you");

        std::mt19937 random(7);
        const std::vector<std::string> words = {"a",
                                                "of",
                                                "\xC3\xBC"
                                                "ber",
                                                "stone",
                                                "日本語",
                                                "🇩🇪",
                                                "grinding",
                                                "\033[1mx\033[0m"};
        for (int round = 0; round < 200; ++round) {
            std::string text;
            for (int i = 0; i < 60; ++i)
                text += words[random() % words.size()] + (random() % 9 == 0 ? "\n" : " ");
            const int columns = 12 + static_cast<int>(random() % 40);
            const std::string wrapped = wrap_text(text, columns);
            CAPTURE(text);
            CHECK(without_blanks(wrapped) == without_blanks(text));
            for (const std::string& line : lines(wrapped))
                CHECK(text_width(line) <= columns + 1);  // a blank at its end
            for (const size_t piece : {1, 2, 3, 7})
                CHECK(in_pieces(WordWrap(columns), text, piece) == wrapped);
        }
    }

    TEST_CASE("Markdown on a terminal: colours, and not a character changed") {
        const auto styled = [](const std::string& text) {
            return in_pieces(MarkdownStyle(), text, text.size());
        };
        CHECK(styled("## Head\nx") == "\033[1m## Head\033[0m\nx");
        CHECK(styled("a **bold** b") == "a \033[1m**bold**\033[0m b");
        CHECK(styled("2 ** 3 and a*b*c") == "2 ** 3 and a*b*c");
        CHECK(styled("use `x*y` now") == "use \033[36m`x*y`\033[0m now");
        CHECK(styled("> said\nx") == "\033[2m> said\033[0m\nx");
        CHECK(styled("```py\na **b**\n```\nx") ==
              "\033[2m```py\033[0m\n\033[36ma **b**\033[0m\n\033[2m```\033[0m\nx");
        CHECK(styled("#hash, #5\n####### seven") == "#hash, #5\n####### seven");
        CHECK(styled("**open\nx") == "\033[1m**open\033[0m\nx");

        std::mt19937 random(11);
        const std::string alphabet = "a*`#~> \n-_b";
        for (int round = 0; round < 500; ++round) {
            std::string text;
            for (int i = 0; i < 80; ++i) text += alphabet[random() % alphabet.size()];
            CAPTURE(text);
            const std::string whole = styled(text);
            CHECK(without_colors(whole) == text);
            for (const size_t piece : {1, 3, 10}) CHECK(in_pieces(MarkdownStyle(), text, piece) == whole);
            const size_t last = whole.rfind("\033[");
            CHECK((last == std::string::npos || whole.substr(last, 4) == "\033[0m"));
        }
    }

    TEST_CASE("completion: commands, and only commands' arguments") {
        const std::vector<std::string> commands = {"/help", "/save", "/stats", "/read"};
        CHECK(complete_line("/s", commands).words == std::vector<std::string>{"/save", "/stats"});
        CHECK(complete_line("/he", commands).words == std::vector<std::string>{"/help"});
        for (const char* none : {"", "he", "//s", "/help x", "a /s"})
            CHECK(complete_line(none, commands).words.empty());
        const Completion file = complete_line("/read  " QUERN_SOURCE_DIR "/tools/run/pas", commands);
        CHECK(file.from == 7);
        CHECK(file.words == std::vector<std::string>{QUERN_SOURCE_DIR "/tools/run/pasted.cpp",
                                                     QUERN_SOURCE_DIR "/tools/run/pasted.h"});
        CHECK(complete_line("/read " QUERN_SOURCE_DIR "/tool", commands).words ==
              std::vector<std::string>{QUERN_SOURCE_DIR "/tools/"});
        CHECK(complete_line("/read /no/such/folder/x", commands).words.empty());
        CHECK(common_prefix({"/save", "/stats"}) == "/s");
        CHECK(common_prefix({"one"}) == "one");
        CHECK(common_prefix({}).empty());
    }

    TEST_CASE("pasted texts: short ones stay, long ones have labels of their own") {
        PastedTexts pasted;
        CHECK(pasted.fold("a\nb\n") == "a\nb\n");
        std::string long_text, other;
        for (int i = 0; i < 30; ++i) long_text += "x\n", other += "[pasted 30 lines]\n";
        const std::string label = pasted.fold(long_text), second = pasted.fold(other);
        CHECK(label == "[pasted 30 lines]");
        CHECK(second != label);
        CHECK(pasted.fold(std::string(5000, 'y')) == "[pasted 5000 characters]");
        CHECK(pasted.unfold("a " + label + " b " + second) == "a " + long_text + " b " + other);
        CHECK(pasted.unfold("[pasted 30 line]") == "[pasted 30 line]");
        CHECK(pasted.label_at_end("a " + label) == label.size());
        CHECK(pasted.label_at_end(label + " ") == 0);
    }
}
