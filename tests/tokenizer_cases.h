// A tokenizer against the cases that Hugging Face tokenizers made with the same files.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "ggml-like/json.h"
#include "models/tokenizer.h"
#include "models/utf8.h"
#include "tokenizer_vectors.h"

namespace quern::test {

using nlohmann::json;
using Markers = Tokenizer::Markers;

inline std::string from_hex(const std::string& hex) {
    std::string bytes;
    for (size_t i = 0; i + 1 < hex.size(); i += 2) {
        bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

inline std::string streamed(const Tokenizer& t, const Ids& ids, bool skip_special) {
    StreamDecoder decoder(t, skip_special);
    std::string text;
    for (int32_t id : ids) {
        const std::string part = decoder.push(id);
        if (!is_valid_utf8(part)) return "<push() returned half a character>";
        text += part;
    }
    return text + decoder.flush();
}

/// Counts mismatches and shows the first ones.
class Tally {
  public:
    template <typename T>
    void compare(const char* what, const json& test, const T& found, const T& expected) {
        ++compared_;
        if (found == expected) return;
        if (++mismatches_ <= 10)
            MESSAGE(std::string(what) << " of " << test.dump() << "\nfound " << json(found).dump());
    }
    int compared() const { return compared_; }
    int mismatches() const { return mismatches_; }

  private:
    int compared_ = 0, mismatches_ = 0;
};

/// Decoding in one go and as a stream against the vectors; left out in a test case: same as `usual`.
inline void compare_decoding(const Tokenizer& t, const json& test, const std::string& usual, Tally& tally) {
    const auto ids = test.at("ids").get<Ids>();
    const std::string decoded = test.value("decoded", usual);
    const std::string without = test.value("without_special", decoded);
    tally.compare("decode", test, t.decode(ids, false), decoded);
    tally.compare("decode(skip_special)", test, t.decode(ids, true), without);
    tally.compare("stream", test, streamed(t, ids, false), decoded);
    tally.compare("stream(skip_special)", test, streamed(t, ids, true), without);
}

/// `directory` has the cases.json of scripts/make_tokenizer_vectors.py for this tokenizer.
inline Tally compare_cases(const Tokenizer& t, const std::string& directory) {
    const json cases = json::parse(read_text(directory + "/cases.json"));
    Tally tally;
    tally.compare("size", json(), t.size(), cases.at("size").get<int64_t>());
    for (const json& test : cases.at("strings")) {
        const auto text = test.at("text").get<std::string>();
        const auto ids = test.at("ids").get<Ids>();
        tally.compare("encode(control)", test, t.encode(text, Markers::control), ids);
        tally.compare("encode(literal)", test, t.encode(text, Markers::literal), test.value("literal", ids));
        compare_decoding(t, test, text, tally);
    }
    for (const json& test : cases.at("streams")) compare_decoding(t, test, "", tally);
    for (const json& test : cases.at("invalid")) {
        const std::string bytes = from_hex(test.at("bytes").get<std::string>());
        tally.compare("encode(invalid UTF-8)", test, t.encode(bytes, Markers::control),
                      test.at("ids").get<Ids>());
        std::string repaired;
        append_utf8_lossy(repaired, bytes);
        tally.compare("repair", test, repaired, test.at("text").get<std::string>());
    }
    return tally;
}

}  // namespace quern::test
