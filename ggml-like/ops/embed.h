// embed: y[t] = table[ids[t]]
//
// ids I32 [T], table [V, D] (any dense format) -> y [T, D] in `dtype`, rounded once. An id outside [0, V)
// throws.
#pragma once

#include "ggml-like/graph.h"
#include "ggml-like/weight.h"

namespace quern {

struct EmbedParams {
    const Weight* table;
};

extern const Op kEmbed;

Tensor* embed(Graph& g, std::string_view name, const Weight& table, Tensor* ids, DType dtype);

}  // namespace quern
