// tokenizer.json and tokenizer_config.json in their spellings, and damaged in every place.
#include <doctest/doctest.h>

#include <algorithm>

#include "ggml-like/error.h"
#include "ggml-like/json.h"
#include "tokenizer_vectors.h"

using namespace quern::test;
using nlohmann::json;
using quern::Error;
using quern::ErrorKind;
using quern::Tokenizer;
using Markers = quern::Tokenizer::Markers;

namespace {

/// The committed tokenizer.json, to be damaged.
json good_json() { return json::parse(read_text(kTokenizerVectors + "/tokenizer.json")); }

/// The message of the error that these files raise, or "" when they load.
std::string error_of(const json& root, const std::string& config = "", int64_t rows = 0) {
    try {
        Tokenizer::from_json(root.dump(), config, rows);
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::model);
        return error.what();
    }
    return "";
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

/// The same tokenizer with an edit to its JSON.
template <typename Edit>
std::string error_after(Edit edit) {
    json root = good_json();
    edit(root);
    return error_of(root);
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("tokenizer: both spellings of merges are the same tokenizer") {
        json root = good_json();
        for (json& merge : root["model"]["merges"]) {
            merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
        }
        root["model"]["merges"].insert(root["model"]["merges"].begin(), "#version: 0.2");
        const Tokenizer other = Tokenizer::from_json(root.dump(), "", 0);
        CHECK(other.size() == 3026);  // without tokenizer_config.json seven added tokens are not there
        const std::string text = read_text(QUERN_SOURCE_DIR "/tests/tokenizer.cpp").substr(0, 20000);
        CHECK(other.encode(text, Markers::literal) == tokenizer().encode(text, Markers::literal));
    }

    TEST_CASE("tokenizer: ignore_merges takes a whole word") {
        json root = good_json();
        root["model"]["ignore_merges"] = true;
        const Tokenizer whole = Tokenizer::from_json(root.dump(), "", 0);
        for (int32_t id = 256; id < 3000; ++id) {  // every word of ASCII letters
            const std::string text(whole.piece(id));
            if (!std::all_of(text.begin(), text.end(), [](char c) { return c >= 'a' && c <= 'z'; })) continue;
            CHECK(whole.encode(text, Markers::literal) == Ids{id});
        }
    }

    TEST_CASE("tokenizer: added tokens inside the vocabulary") {
        json root = good_json();  // some trainers put them into model.vocab as well
        for (const json& token : root["added_tokens"])
            root["model"]["vocab"][token["content"].get<std::string>()] = token["id"];
        const Tokenizer t =
            Tokenizer::from_json(root.dump(), read_text(kTokenizerVectors + "/tokenizer_config.json"), 3033);
        CHECK(t.size() == 3033);
        CHECK(t.encode("<think>", Markers::control) == Ids{3024});
        CHECK(t.encode("<think>", Markers::literal) == tokenizer().encode("<think>", Markers::literal));
    }

    TEST_CASE("tokenizer: the older Qwen expression is known too") {
        json root = good_json();
        auto& regex = root["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
        regex =
            R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
        const Tokenizer t = Tokenizer::from_json(root.dump(), "", 0);
        CHECK(t.decode(t.encode("it's \u0915\u093f 12\n\n x", Markers::literal), false) ==
              "it's \u0915\u093f 12\n\n x");
        regex = R"(\w+|\W+)";
        CHECK(contains(error_of(root), R"(\w+|\W+)"));
    }

    TEST_CASE("tokenizer: a damaged tokenizer.json is refused with its reason") {
        const auto vocab = [](json& root) -> json& { return root["model"]["vocab"]; };
        CHECK(error_after([](json&) {}) == "");
        CHECK(contains(error_after([](json& r) { r.erase("model"); }), "model"));
        CHECK(contains(error_after([](json& r) { r = json::array(); }), "expected an object"));
        CHECK(contains(error_after([](json& r) { r["model"].erase("merges"); }), "model.merges"));
        CHECK(contains(error_after([](json& r) { r["model"].erase("vocab"); }), "model.vocab"));
        CHECK(contains(error_after([](json& r) { r["model"]["type"] = "Unigram"; }), "Unigram"));
        for (const char* key : {"unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
            CHECK(contains(error_after([&](json& r) { r["model"][key] = "##"; }), key));
            CHECK(error_after([&](json& r) { r["model"][key] = ""; }) == "");
        }
        CHECK(contains(error_after([](json& r) { r["model"]["dropout"] = 0.1; }), "dropout"));
        CHECK(contains(error_after([](json& r) { r["model"]["byte_fallback"] = true; }), "byte_fallback"));
        CHECK(contains(error_after([](json& r) { r["normalizer"] = nullptr; }), "normalizer"));
        CHECK(contains(error_after([](json& r) { r["normalizer"]["type"] = "NFKC"; }), "NFKC"));
        CHECK(contains(error_after([](json& r) { r["decoder"]["type"] = "Metaspace"; }), "Metaspace"));
        CHECK(contains(error_after([](json& r) {
                           r["post_processor"] = {{"type", "TemplateProcessing"}};
                       }),
                       "post_processor"));
        const auto step = [](json& r, int i) -> json& { return r["pre_tokenizer"]["pretokenizers"][i]; };
        CHECK(contains(error_after([&](json& r) { step(r, 0)["behavior"] = "Removed"; }), "Removed"));
        CHECK(contains(error_after([&](json& r) { step(r, 0)["invert"] = true; }), "invert"));
        CHECK(contains(error_after([&](json& r) { step(r, 0)["pattern"] = {{"String", " "}}; }), "Regex"));
        CHECK(contains(error_after([&](json& r) { step(r, 1)["add_prefix_space"] = true; }),
                       "add_prefix_space"));
        CHECK(contains(error_after([&](json& r) { step(r, 1)["use_regex"] = true; }), "use_regex"));
        CHECK(contains(error_after([&](json& r) { step(r, 1).erase("use_regex"); }), "use_regex"));
        CHECK(contains(error_after([&](json& r) { r["pre_tokenizer"]["pretokenizers"].erase(1); }),
                       "Split and ByteLevel"));

        CHECK(contains(error_after([&](json& r) { vocab(r)["!"] = 5; }), "same id 5"));
        CHECK(contains(error_after([&](json& r) { vocab(r)["newword"] = 4000; }), "gaps"));
        CHECK(contains(error_after([&](json& r) { vocab(r)["newword"] = 3000; }), "same id 3000"));
        CHECK(contains(error_after([&](json& r) { vocab(r)["!"] = -1; }), "-1"));
        CHECK(contains(error_after([&](json& r) { vocab(r)["!"] = 0.5; }), "0.5"));
        CHECK(contains(error_after([&](json& r) { vocab(r)["!"] = "0"; }), "!"));
        CHECK(contains(error_after([&](json& r) { vocab(r)["!"] = 18446744073709551615u; }), "!"));
        CHECK(contains(error_after([&](json& r) { vocab(r).erase("!"), vocab(r)["zzz"] = 0; }), "0x21"));
        CHECK(contains(error_after([&](json& r) { vocab(r) = json::object(); }), "gaps"));

        const auto merge = [](json& r) -> json& { return r["model"]["merges"][3]; };
        for (const json& bad :
             {json("ab"), json("a b c"), json(1), json(json::array({"a"})), json(json::array({"a", 2}))}) {
            CHECK(contains(error_after([&](json& r) { merge(r) = bad; }), "merge 3"));
        }
        CHECK(contains(error_after([&](json& r) { merge(r) = {"zzzzqq", "a"}; }), "zzzzqq"));
        CHECK(contains(error_after([&](json& r) { merge(r) = {"~", "~~~~~~~~"}; }), "not in"));
    }

    TEST_CASE("tokenizer: damaged added tokens are refused") {
        const auto token = [](json& r) -> json& { return r["added_tokens"][2]; };
        CHECK(contains(error_after([&](json& r) { token(r)["id"] = 3001; }), "id 3001"));
        CHECK(contains(error_after([&](json& r) { token(r)["id"] = 12; }), "same id 12"));
        CHECK(contains(error_after([&](json& r) { token(r)["id"] = 9999; }), "gaps"));
        CHECK(contains(error_after([&](json& r) { token(r).erase("id"); }), "no valid id"));
        CHECK(contains(error_after([&](json& r) { token(r)["content"] = "<|im_start|>"; }), "two ids"));
        CHECK(contains(error_after([&](json& r) { token(r)["content"] = ""; }), "no text"));
        CHECK(contains(error_after([&](json& r) { token(r)["content"] = "!"; }), "!"));
        CHECK(contains(error_after([&](json& r) { token(r)["lstrip"] = true; }), "lstrip"));
        CHECK(contains(error_after([&](json& r) { token(r)["normalized"] = true; }), "normalized"));
        CHECK(contains(error_after([&](json& r) { token(r)["special"] = 1; }), "special"));
        CHECK(contains(error_after([&](json& r) { r["added_tokens"] = 5; }), "not a list"));
        CHECK(contains(error_after([&](json& r) { r["added_tokens"][0] = 5; }), "expected an object"));
        // An ordinary token declared as an added one: plain text could turn into it.
        CHECK(contains(error_after([&](json& r) { token(r)["content"] = "!", token(r)["id"] = 0; }), ""));
        CHECK(contains(error_after([&](json& r) {
                           r["added_tokens"].push_back({{"id", 0}, {"content", "!"}});
                       }),
                       "single byte"));
        CHECK(
            contains(error_after([&](json& r) {
                         const json& first = r["model"]["merges"][0];
                         const std::string text = first[0].get<std::string>() + first[1].get<std::string>();
                         r["added_tokens"].push_back({{"id", r["model"]["vocab"][text]}, {"content", text}});
                     }),
                     "result of a merge"));
    }

    TEST_CASE("tokenizer: tokenizer_config.json must fit") {
        const json root = good_json();
        const json config = json::parse(read_text(kTokenizerVectors + "/tokenizer_config.json"));
        CHECK(error_of(root, config.dump(), 3033) == "");
        CHECK(error_of(root, config.dump(), 4096) == "");
        CHECK(contains(error_of(root, config.dump(), 3032), "3032 rows"));
        CHECK(contains(error_of(root, config.dump(), 2000), "2000 rows"));
        CHECK(error_of(root, "{}") == "");
        CHECK(contains(error_of(root, "[]"), "tokenizer_config.json"));
        CHECK(contains(error_of(root, "{"), "tokenizer_config.json"));
        const auto after = [&](const char* key, const json& value) {
            json edited = config;
            edited["added_tokens_decoder"][key] = value;
            return error_of(root, edited.dump());
        };
        const auto token = [](const char* text) { return json{{"content", text}, {"special", true}}; };
        CHECK(contains(after("3002", token("<|other|>")), "3002"));
        CHECK(contains(after("x", token("<|other|>")), "not a token id"));
        CHECK(contains(after("03033", token("<|other|>")), "not a token id"));
        CHECK(contains(after("-1", token("<|other|>")), "no valid id"));
        CHECK(contains(after("99999999999", token("<|other|>")), "not a token id"));
        CHECK(contains(after("3040", token("<|other|>")), "gaps"));
        CHECK(contains(after("3033", token("<|im_end|>")), "two ids"));
        CHECK(after("3033", token("<|other|>")) == "");
        json special = config;  // transformers applies the config last
        special["added_tokens_decoder"]["3024"]["special"] = true;
        CHECK(Tokenizer::from_json(root.dump(), special.dump(), 0).is_special(3024));
    }

    TEST_CASE("tokenizer: files that are not there or not JSON") {
        CHECK_THROWS_AS(Tokenizer::load(kTokenizerVectors + "/nowhere", 0), Error);
        for (const char* text :
             {"", "{", "null", "[]", "{}", "\xff", "{\"model\":{\"vocab\":{\"a\":0,\"a\":1}}}"}) {
            CHECK_THROWS_AS(Tokenizer::from_json(text, "", 0), Error);
        }
        // A file cut anywhere is an error, never a crash.
        const std::string text = read_text(kTokenizerVectors + "/tokenizer.json");
        for (size_t length = 0; length < text.size(); length += 4999) {
            CHECK_THROWS_AS(Tokenizer::from_json(std::string_view(text).substr(0, length), "", 0), Error);
        }
    }
}
