// What tokenizer.json and tokenizer_config.json say, read strictly: a structure that encode() would not
// honour exactly is an error, never an approximation.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/added_tokens.h"
#include "models/bpe.h"
#include "models/token_pieces.h"

namespace quern {

struct TokenizerFile {
    TokenPieces pieces;                   // by id, added tokens included; no gaps
    std::array<int32_t, 256> byte_ids{};  // token of each single byte
    std::vector<MergeRule> merges;        // by rank
    std::vector<AddedToken> added;
    std::string pretokenizer_regex;
    std::vector<int32_t> words;  // "ignore_merges": tokens taken as a whole word without merging
};

/// Throws Error(model). `vocab_rows` 0 = unknown; an empty config text means there is no such file.
TokenizerFile read_tokenizer_file(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                                  int64_t vocab_rows, int threads);

}  // namespace quern
