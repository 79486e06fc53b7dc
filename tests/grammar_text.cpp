// Regular expressions and GBNF while decoding, against texts written by hand and std::regex.
#include <doctest/doctest.h>

#include <chrono>
#include <random>
#include <regex>

#include "ggml-like/error.h"
#include "tools/engine/grammar.h"

namespace quern {
namespace {

using GrammarPtr = std::shared_ptr<const Grammar>;

bool whole(const GrammarPtr& grammar, std::string_view text) {
    GrammarMatcher m(grammar);
    for (const char c : text) {
        if (!m.accepts({&c, 1})) return false;
        m.push({&c, 1});
    }
    return m.complete();
}

std::string error_of(GrammarPtr (*compile)(std::string_view), const std::string& text) {
    try {
        compile(text);
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::usage);
        return error.what();
    }
    return "";
}

TEST_SUITE("cpu") {
    TEST_CASE("regex: texts that match as a whole, as std::regex says") {
        std::mt19937 random(5);
        for (const char* pattern :
             {"(a|b)*abb", "a{2,4}b?", "(ab|a)(bc|c)+", "[a-c]+x[^a-c]", "((a*)*b)*", "\\d{1,3}(\\.\\d+)?",
              "x(?:a|b|)c", "[\\w.]+b", "(a|ab|abc){1,3}", "a+?b*?", "[]a]+", "\\s?b\\.c"}) {
            const GrammarPtr grammar = Grammar::regex(pattern);
            const std::regex reference(pattern[1] == ']' ? "[\\]a]+" : pattern);
            CAPTURE(pattern);
            for (int i = 0; i < 1500; ++i) {
                std::string text;
                for (size_t n = 1 + random() % 7; n > 0; --n) text += "aabbccxd1.9] "[random() % 13];
                CAPTURE(text);
                CHECK(whole(grammar, text) == std::regex_match(text, reference));
            }
        }
    }

    TEST_CASE("regex: characters beyond ASCII, anchors, named groups") {
        const GrammarPtr letters = Grammar::regex("^[à-ÿ€-₿]{2}$|(?P<face>😀+)|\\u00e9x");
        for (const char* good : {"éü", "€é", "😀😀", "éx"}) CHECK(whole(letters, good));
        for (const char* bad : {"é", "ab", "😁", "éüé"}) CHECK_FALSE(whole(letters, bad));
        CHECK(whole(Grammar::regex("[^x]"), "\xF4\x8F\xBF\xBF"));
        CHECK_FALSE(whole(Grammar::regex("[^x]"), "\xED\xA0\x80"));
        CHECK_FALSE(whole(Grammar::regex("a.b"), "a\nb"));
        for (const char* bad : {"(a", "a)", "[a", "*a", "a**", "(?=a)b", "(?<!a)b", "\\bx", "(a)\\1",
                                "a{3,2}", "[b-a]", "a^b", "a\\", "a{99999}", "\xFF"}) {
            CAPTURE(bad);
            CHECK(error_of(Grammar::regex, bad).find("regex: ") == 0);
        }
    }

    TEST_CASE("gbnf: rules, classes, repetitions, comments, recursion") {
        const GrammarPtr arithmetic = Grammar::gbnf(R"x(
# sums
root   ::= sum ("\n" sum){0,2}
sum    ::= term (("+" | "-") term)*   # two kinds
term   ::= number
         | "(" sum ")"
number ::= [0-9]+ ("." [0-9]+)?)x");
        for (const char* good : {"1", "1+2", "(1+2)-3.5", "((4))\n5", "1\n2\n3"})
            CHECK(whole(arithmetic, good));
        for (const char* bad : {"", "1+", "(1", "1)", "1.", "a", "1\n2\n3\n4"})
            CHECK_FALSE(whole(arithmetic, bad));
        const GrammarPtr list = Grammar::gbnf(
            "root ::= item root | item\nitem ::= [^\\n\\x41-\\x5A] | \"\\u00e4\" | nothing \"Z\"\n"
            "nothing ::= (\"q\"?)*");
        CHECK(whole(list, std::string(3000, 'a') + "äZ"));  // as long as the list may be
        CHECK_FALSE(whole(list, "aB"));
        GrammarMatcher m(Grammar::gbnf("root ::= \"yes\" | \"no\""));
        m.push("yes");
        CHECK(m.finished());
    }

    TEST_CASE("gbnf: what is wrong is named") {
        const auto says = [](const char* grammar, const char* part) {
            CAPTURE(grammar);
            CHECK(error_of(Grammar::gbnf, grammar).find(part) != std::string::npos);
        };
        says("root ::= x", "no rule 'x'");
        says("x ::= \"a\"", "no rule 'root'");
        says("root ::= root \"a\" | \"b\"", "'root' begins with itself");
        says("root ::= a\na ::= \"x\"? b\nb ::= a \"c\"", "begins with itself");
        says("root ::= \"a", "too soon");
        says("root ::= [a", "missing");
        says("root = \"a\"", "'::='");
        says("root ::= \"a\"\nroot ::= \"b\"", "twice");
        says("root ::= (\"a\"", "')'");
        says("root ::= \"a\"{9999}{9999}", "");
        says("root ::= (\"a\"{999}){999}", "too large");
    }

    TEST_CASE("grammar bombs: compiling and matching end soon") {
        const auto begun = std::chrono::steady_clock::now();
        for (const char* pattern :
             {"((((a*)*)*)*)*b", "(a|a|a|a|a|a){1,300}b", "(.{0,300}a){1,2}", "(a?){1000}a{1000}"}) {
            GrammarMatcher m(Grammar::regex(pattern));
            const std::string text(60, 'a');
            m.push(text);
        }
        std::string wide = "root ::= r0\n";
        for (int i = 0; i < 900; ++i)
            wide += "r" + std::to_string(i) + " ::= " + (i < 899 ? "r" + std::to_string(i + 1) : "\"a\"") +
                    " | \"b\"\n";
        GrammarMatcher deep(Grammar::gbnf(wide));
        deep.push("b");
        CHECK(deep.complete());
        GrammarMatcher nested(Grammar::gbnf("root ::= \"(\" root \")\" | \"\""));
        for (int i = 0; i < 1000 && nested.accepts("("); ++i) nested.push("(");
        CHECK(nested.accepts(")"));
        CHECK(error_of(Grammar::regex, std::string(1 << 20, 'a')).find("longer") != std::string::npos);
        CHECK(error_of(Grammar::regex, std::string(5000, '(')).find("deep") != std::string::npos);
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(20));
    }
}

}  // namespace
}  // namespace quern
