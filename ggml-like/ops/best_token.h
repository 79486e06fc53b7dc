// best_token: the token with the highest logit of each row, of a head that may have fewer rows than the vocabulary
//
// logits F32 [R, N] -> ids I32 [R]: column c is token c below `first`, else token second + c - first. Of equal logits the
// lower column wins; NaN never does, nor a token from `vocab` on; token 0 if that leaves none.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

/// Which tokens the columns stand for.
struct TokenColumns {
    int64_t first;   // columns of tokens from 0 on
    int64_t second;  // the token of the next column
    int64_t vocab;

    int64_t token(int64_t column) const { return column < first ? column : second + column - first; }
};

/// inputs {logits}; outputs {ids, work}: work I64 is kernel scratch.
extern const Op kBestToken;

/// `ids`: I32 [R], a part of a scratch tensor.
void best_token(Graph& g, std::string_view name, Tensor* logits, const TokenColumns& columns, Tensor* ids);

}  // namespace quern
