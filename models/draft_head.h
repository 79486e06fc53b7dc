// The head that drafters choose from: rows of the model's head for the tokens that occur most, and for those that mark up
// answers, in FP8. A draft's token is read from the head once for each forward pass of a drafter, so a full head would
// cost more than all the rest of it; what a draft misses by that, verification mends.
//
// Ids of byte-level BPE vocabularies are in the order of their merges, which is about that of frequency: the first ids are
// the tokens that occur most.
#pragma once

#include <optional>

#include "ggml-like/ops/best_token.h"
#include "ggml-like/weight.h"

namespace quern {

class Tokenizer;

struct DraftHead {
    Weight weight;         // without data until it is placed (ModelWeights::copies)
    Weight from;           // the same rows as stored
    TokenColumns columns;  // which tokens the rows stand for
};

/// As many rows of `head` as fit into `bytes`: of tokens 0 and up, and from the first added token of the tokenizer to the last;
/// without a tokenizer, of the last rows, 256 or an eighth of all. Rows in 16 or 32 bits become FP8, others stay as they are.
/// None if the whole head is no larger than that, or if there is no room for more rows than those of added tokens. `vocab`: ids
/// that may be sampled.
std::optional<DraftHead> plan_draft_head(const Weight& head, int64_t bytes, int64_t vocab,
                                         const Tokenizer* tokenizer);

}  // namespace quern
