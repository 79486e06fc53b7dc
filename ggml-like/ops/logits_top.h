// logits_top: the 64 highest logits of each row, and the sum over all of them
//
// logits F32 [R, V], temperature F32 [R] (0 and less count as 1) -> top I32 [R, 130], of each row:
//   [0, 64) ids in falling order of logit, ties to the lower id; -1 where there are fewer valid ids, and from the second on where
//       the temperature is negative: that says that nobody reads more than the first
//   [64, 128) the bits of their logits (F32)
//   [128] bits of F32: sum over all valid ids of exp((logit - highest) / temperature)
//   [129] 1 if no valid logit is NaN or +infinity and what is wanted is exact; 0: use the whole row instead, ids and logits mean nothing
// Valid ids are those of [0, vocab) whose logit is not -infinity; rows of the head beyond vocab are padding. The 64 are
// enough for greedy and top-k up to 64, and for top-p and min-p if the set fits.
#pragma once

#include "ggml-like/graph.h"

namespace quern {

inline constexpr int kTopLogits = 64;
inline constexpr int kTopWords = 2 * kTopLogits + 2;

struct LogitsTopParams {
    int64_t vocab;
};

/// inputs {logits, temperature}; outputs {top, work}: work U8 is kernel scratch.
extern const Op kLogitsTop;

Tensor* logits_top(Graph& g, std::string_view name, Tensor* logits, Tensor* temperature, int64_t vocab);

}  // namespace quern
