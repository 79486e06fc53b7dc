// tokenizer.json as JSON: its two large parts, "model.vocab" and "model.merges", as flat lists of views, and the rest
// as a document. One document for all of it would take longer to build than the rest of a load.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ggml-like/json.h"
#include "ggml-like/name_hash.h"

namespace quern {

inline constexpr std::string_view kTokenizerFile = "tokenizer.json";

/// A token id, or -1.
int32_t token_id_from(const nlohmann::ordered_json& value);

/// Views point into the text that was read or into `unescaped`.
struct TokenizerText {
    struct Merge {
        std::string_view left, right;  // left.data() null: a header line, or the bad merge
    };
    struct BadId {
        std::string_view text;
        nlohmann::ordered_json value;
    };
    struct BadMerge {
        size_t index;
        nlohmann::ordered_json value;
    };

    nlohmann::ordered_json rest;        // "model.vocab" is {} and "model.merges" is [] here
    NameMap vocab;                      // texts to ids, in the order of the file
    std::optional<BadId> bad_id;        // the first entry of the vocabulary whose value is not a token id
    std::vector<Merge> merges;          // by their index in the file
    std::optional<BadMerge> bad_merge;  // the first that is neither "a b" nor ["a", "b"]
    std::unique_ptr<char[]> unescaped;  // strings that were written with escapes
};

/// Throws Error(model) for what is not JSON, with the message of parse_json. `tokens` is how many are
/// expected, 0 = unknown. `text` must outlive the result.
TokenizerText read_tokenizer_text(std::string_view text, size_t tokens);

}  // namespace quern
