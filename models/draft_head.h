// The head that drafters choose from: rows of the model's head for the tokens that occur most, and for those that mark up
// answers, in NVFP4. A draft's token is read from the head once for each forward pass of a drafter, so a full head would
// cost more than all the rest of it; what a draft misses by that, verification mends.
//
// Ids of byte-level BPE vocabularies are in the order of their merges, which is about that of frequency, but one language after
// another where a vocabulary has been extended. Of Qwen3.6's, the first 65,536 are 98 % of English text and code, yet 18 % of
// Chinese; words of Chinese are 95,400 to 147,500, those of other languages follow. So a pass can read the first rows only, all of
// the copy, or the model's head (DraftRows): what a text needs shows in its tokens.
#pragma once

#include <optional>

#include "ggml-like/ops/best_token.h"
#include "ggml-like/weight.h"
#include "models/model.h"

namespace quern {

class Tokenizer;

struct DraftHead {
    Weight weight;         // without data until it is placed (ModelWeights::copies)
    Weight from;           // the same rows as stored
    Weight frequent;       // its first rows, in its memory; or nothing
    TokenColumns columns;  // which tokens the rows stand for
    DraftTokens tokens;

    /// DraftRows::frequent or copied.
    const Weight& rows(DraftRows which) const {
        return which == DraftRows::frequent && frequent ? frequent : weight;
    }
};

/// As many rows of `head` as fit into `bytes`: from the first added token of the tokenizer to the last (without a tokenizer, of the last
/// rows, 256 or an eighth of all), then of tokens 0 and up. Those of the first `frequent` tokens are also a head by themselves,
/// if the copy has at least a quarter more. Rows in 16 or 32 bits become NVFP4 (FP8 where their width is no multiple of 16), others
/// stay as they are. None if the whole head is no larger than that, or if there is no room for more rows than those of added tokens.
/// `vocab`: ids that may be sampled.
std::optional<DraftHead> plan_draft_head(const Weight& head, int64_t bytes, int64_t vocab,
                                         const Tokenizer* tokenizer, int64_t frequent);

}  // namespace quern
