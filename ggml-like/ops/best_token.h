// best_token: the token with the highest logit of each row, of a head that may have fewer rows than the vocabulary
//
// logits F32 [R, N] -> ids I32 [R]: column c is token start + c below `first`, else token c - first. Of equal logits the lower
// column wins; NaN never does, nor a token from `vocab` on; token 0 if that leaves none.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

/// Blocks of a row, at most, that look for its best column.
inline constexpr int kBestBlocks = 256;

/// Which tokens the columns stand for: those from `start` on, then those from 0 on.
struct TokenColumns {
    int64_t first;  // columns of tokens from `start` on
    int64_t start;
    int64_t vocab;

    int64_t token(int64_t column) const { return column < first ? start + column : column - first; }
};

/// inputs {logits}; outputs {ids, work}: work I64 [R, kBestBlocks] is kernel scratch.
extern const Op kBestToken;

/// Throws Error unless ids, I32 [R], may be chosen from `count` columns.
void check_best(const char* op, std::string_view name, const TokenColumns& columns, int64_t count,
                const Tensor* ids, int64_t rows);
/// The kernel scratch of a node called `name`.
Tensor* best_token_work(Graph& g, std::string_view name, int64_t rows);

/// `ids`: I32 [R], a part of a scratch tensor.
void best_token(Graph& g, std::string_view name, Tensor* logits, const TokenColumns& columns, Tensor* ids);

}  // namespace quern
