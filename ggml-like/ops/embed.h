// embed: x[t] = table[ids[t]], where the residual stream begins (residual.h)
//
// ids I32 [T], table [V, D] (any dense format), the first norm -> Residual of x F32 [T, D]. An id outside [0, V)
// throws on the CPU; the GPU clamps it.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct EmbedParams {
    const Weight* table;
    StepKind kind;
};

/// inputs {ids, next norm}; outputs {x, h, squares}.
extern const Op kEmbed;

Residual embed(Graph& g, std::string_view name, const Weight& table, Tensor* ids, const NextNorm& next);

}  // namespace quern
