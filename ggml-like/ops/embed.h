// embed: x[t] = table[ids[t]], where the residual stream begins (residual.h); rows of images: x[t] = rows[source[t]]
//
// ids I32 [T], table [V, D] (any dense format), the first norm -> Residual of x F32 [T, D]. An id outside [0, V)
// throws on the CPU; the GPU clamps it. rows F32 [I, D] and source I32 [T] are given together or not at all; source -1: none.
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct EmbedParams {
    const Weight* table;
    StepKind kind;
};

/// inputs {ids, next norm} and, if there are any, {source, rows}; outputs {x, h, squares}.
extern const Op kEmbed;

/// Rows of images among those of tokens.
struct ImageRows {
    Tensor *source = nullptr, *rows = nullptr;
};

Residual embed(Graph& g, std::string_view name, const Weight& table, Tensor* ids, const NextNorm& next,
               const ImageRows& images = {});

}  // namespace quern
