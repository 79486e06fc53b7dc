// draft_token: the token that a drafter chooses: norm_linear with its head (norm_linear.h), then best_token of the logits
//
// h [R, K] and squares (residual.h), W [N, K] in any format of weight.h -> ids I32 [R], as best_token.h says. The logits have the
// bits of norm_linear; a backend may leave them out.
#pragma once

#include "ggml-like/ops/best_token.h"
#include "ggml-like/ops/norm_linear.h"

namespace quern {

struct DraftTokenParams {
    NormLinearParams product;
    TokenColumns columns;
};

/// inputs {h, squares}; outputs {ids, logits, work}: logits F32 [R, N] and work I64 are kernel scratch.
extern const Op kDraftToken;

/// `ids`: I32 [R], a part of a scratch tensor.
void draft_token(Graph& g, std::string_view name, const Residual& in, const Weight& head,
                 const TokenColumns& columns, float eps, StepKind kind, Tensor* ids);

/// The two nodes that it stands for.
struct DraftTokenNodes {
    Node product, best;

    explicit DraftTokenNodes(const Node& node);
};

}  // namespace quern
