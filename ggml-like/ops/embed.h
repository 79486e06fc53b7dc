// embed: x[t] = table[ids[t]], where the residual stream begins (residual.h)
//
// ids I32 [T], table [V, D] (any dense format), the first norm -> Residual of x F32 [T, D]. An id outside [0, V)
// throws on the CPU; the GPU clamps it. Where source I32 [T] is given and not -1, a row comes from elsewhere: of an image,
// x[t] = rows[source[t]], rows F32 [I, D]; or by an id that only the device knows yet, x[t] = table[rows[source[t]]], rows I32 [I].
#pragma once

#include "ggml-like/ops/residual.h"

namespace quern {

struct EmbedParams {
    const Weight* table;
    StepKind kind;
    bool after_all;  // it starts when all before it has ended: nodes after it may read that before they wait
};

/// inputs {ids, next norm} and, if there are any, {source, rows}; outputs {x, h, squares}.
extern const Op kEmbed;

/// Rows that do not come by their own ids; both tensors or none.
struct OtherRows {
    Tensor *source = nullptr, *rows = nullptr;
};

Residual embed(Graph& g, std::string_view name, const Weight& table, Tensor* ids, const NextNorm& next,
               const OtherRows& others = {}, bool after_all = false);

}  // namespace quern
