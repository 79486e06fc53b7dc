// tokenizer.json as JSON: the reader of its large lists accepts and refuses what the reader of all other
// files does, in the same words.
#include <doctest/doctest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "ggml-like/error.h"
#include "ggml-like/json.h"
#include "ggml-like/json_guard.h"
#include "ggml-like/json_pull.h"
#include "tokenizer_vectors.h"

using nlohmann::json;
using quern::Error;
using quern::Tokenizer;

namespace {

std::string file_text() { return quern::test::read_text(quern::test::kTokenizerVectors + "/tokenizer.json"); }

/// The vocabulary of a real one, and a few merges.
json small_json() {
    json root = json::parse(file_text());
    root["model"]["merges"].get_ref<json::array_t&>().resize(40);
    return root;
}

/// What f raises, or "".
std::string message_of(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& error) {
        CHECK(error.kind() == quern::ErrorKind::model);
        return error.what();
    }
    return "";
}

std::string load_error(const std::string& text, int threads = 1) {
    return message_of([&] { Tokenizer::from_json(text, "", 0, threads); });
}

/// What the reader of all other files says.
std::string json_error(const std::string& text) {
    return message_of([&] { quern::parse_json_ordered(text, "tokenizer.json"); });
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

/// `text` with its first `from` replaced.
std::string with(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

void check_same_tokens(const std::string& text, int threads = 1) {
    const Tokenizer expected = Tokenizer::from_json(file_text(), "", 0);
    const Tokenizer found = Tokenizer::from_json(text, "", 3033, threads);
    REQUIRE(found.size() == expected.size());
    std::string all;
    for (int32_t id = 0; id < found.size(); ++id) {
        CHECK(found.piece(id) == expected.piece(id));
        all += found.piece(id);
    }
    CHECK(found.encode(all, Tokenizer::Markers::literal) ==
          expected.encode(all, Tokenizer::Markers::literal));
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("tokenizer.json: every way to write it is the same tokenizer") {
        const json root = json::parse(file_text());
        check_same_tokens(root.dump());
        check_same_tokens(root.dump(3));
        check_same_tokens(root.dump(-1, ' ', true), 3);  // all but ASCII as \u escapes
        check_same_tokens("\xef\xbb\xbf" + root.dump());
        check_same_tokens(with(root.dump(), R"("!":0)", R"("!":-0)"));
        check_same_tokens(with(root.dump(), R"("!":0)", "\"\\u0021\" : 0\n"));
        nlohmann::ordered_json turned;  // the merges first
        turned["model"]["merges"] = root["model"]["merges"];
        for (const auto& [key, value] : root["model"].items()) turned["model"][key] = value;
        for (const auto& [key, value] : root.items())
            if (key != "model") turned[key] = value;
        check_same_tokens(turned.dump());
    }

    TEST_CASE("tokenizer.json: what is not JSON is refused as in all other files") {
        const std::string good = small_json().dump();
        REQUIRE(load_error(good) == "");
        const std::string deep = std::string(62, '[') + std::string(62, ']');
        const std::vector<std::string> bad = {
            with(good, R"("!":0)", R"("!":0,"!":0)"),
            with(good, R"("!":0)", "\"!\":0,\"\\u0021\":0"),
            with(good, R"("!":0)", R"("!":{"a":1,"a":1})"),
            with(good, R"("!":0)", R"("!":00)"),
            with(good, R"("!":0)", R"("!":1e999)"),
            with(good, R"("!":0)", R"("!":-)"),
            with(good, R"("!":0)", R"("!" 0)"),
            with(good, R"("!":0)", R"(!:0)"),
            with(good, R"("!":0)", "\"\\ud800\":0"),
            with(good, R"("!":0)", "\"\xed\xa0\x80\":0"),
            with(good, R"("!":0)", "\"\n\":0"),
            with(good, R"("!":0)", R"("!":)" + deep),
            with(good, R"("!":0)", R"("!":)" + deep + R"(,"!":0)"),
            with(good, R"("vocab":{)", R"("vocab":{,)"),
            with(good, R"("vocab":{)", R"("vocab":{},"vocab":{)"),
            with(good, R"("model":{)", R"("model":{},"model":{)"),
            with(good, R"("merges":[)", R"("merges":[,)"),
            with(good, R"("merges":[)", R"("merges":[[],)") + "]",
            with(good, R"("merges":[)", R"("merges":["\x",)"),
            with(good, R"("merges":[)", R"("merges":[["a","b",],)"),
            with(good, R"("merges":[)", R"("merges":[{"a":1,"a":1},)"),
            with(good, R"("merges":[)", R"("merges":[)" + deep + ","),
            with(good, R"("merges":[)", R"("merges":[],"merges":[)"),
            "\xef\xbb\xbf\xef\xbb\xbf" + good,
            good + "x",
            good + good,
        };
        for (const std::string& text : bad) {
            const std::string expected = json_error(text);
            CHECK(contains(expected, "is not valid JSON"));
            CHECK(load_error(text) == expected);
        }
        // One level less is JSON, and no token id.
        const std::string shallow = deep.substr(1, 122);
        CHECK(contains(load_error(with(good, R"("!":0)", R"("!":)" + shallow)), "the id of \"!\""));
        CHECK(contains(load_error(with(good, R"("merges":[)", R"("merges":[)" + shallow + ",")), "merge 0"));
    }

    TEST_CASE("tokenizer.json: damaged anywhere, the same is refused") {
        json root = small_json();
        json& vocab = root["model"]["vocab"];
        for (auto it = vocab.begin(); it != vocab.end();) it = *it >= 300 ? vocab.erase(it) : std::next(it);
        root["model"]["merges"] = json::array({"a b", {"c", "d"}, {"\u0120", "e"}});
        const std::string good = root.dump(-1, ' ', true);
        std::mt19937 random(5);
        const std::string letters = "\"\\{}[]:,0-.eu \n\x01\x80\xc3";
        int refused = 0;
        for (int round = 0; round < 1500; ++round) {
            std::string text = good;
            const size_t at = random() % text.size();
            const char letter = letters[random() % letters.size()];
            if (round % 3 == 0)
                text.erase(at, 1);
            else if (round % 3 == 1)
                text.insert(at, 1, letter);
            else
                text[at] = letter;
            const std::string expected = json_error(text), found = load_error(text);
            refused += !expected.empty();
            CAPTURE(text.substr(at > 20 ? at - 20 : 0, 40));
            if (expected.empty())
                CHECK_FALSE(contains(found, "JSON"));
            else
                CHECK(found == expected);
        }
        CHECK(refused > 300);
    }

    TEST_CASE("tokenizer.json: the first bad merge is the one that is named") {
        json root = json::parse(file_text());
        json& merges = root["model"]["merges"];
        merges.insert(merges.begin(), "#version: 0.2");
        merges[10] = {"a", "nosuchtoken"};
        merges[20] = 7;
        merges[merges.size() - 1] = {"othertoken", "a"};
        for (const int threads : {1, 4}) {
            CHECK(contains(load_error(root.dump(), threads), "merge 10 uses \"nosuchtoken\""));
            json later = root;
            later["model"]["merges"][10] = "#version: 0.2";
            CHECK(contains(load_error(later.dump(), threads), "merge 20 is 7, expected"));
            later["model"]["merges"][20] = "#version: 0.2";
            CHECK(contains(load_error(later.dump(), threads), "uses \"othertoken\""));
        }
    }

    TEST_CASE("tokenizer.json: numbers that are token ids, and others") {
        using quern::JsonPull;
        const auto taken = [](std::string_view text) { return JsonPull(text, "x").accept_integer(300); };
        CHECK(taken("0") == 0);
        CHECK(taken(" 300,") == 300);
        CHECK(taken("7}") == 7);
        for (const char* text : {"", "301", "1000", "99999999999999999999999", "-1", "00", "01", "1.0", "1e0",
                                 "1E0", "\"1\"", "null"})
            CHECK_FALSE(taken(text));
        JsonPull left("  12.5,", "x");
        CHECK_FALSE(left.accept_integer(300));
        left.skip_value("here");
        CHECK(left.offset() == 6);
        const std::string good = small_json().dump();
        for (const std::string value : {"2147483647", "1e0", "0.0", "true", "null", "[0]", "\"0\"", "-1"}) {
            CHECK(contains(load_error(with(good, R"("!":0)", R"("!":)" + value)),
                           "the id of \"!\" in \"model.vocab\" is "));
        }
    }
}
