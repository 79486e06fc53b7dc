// The residual stream between two ops, and the RMSNorm after it, which is split: whoever writes x also writes what the
// norm's readers need, and they apply its factor after their product.
//
//   norm(x) = x * w / rms(x),  rms(x) = sqrt(mean(x^2) + eps);  norm(x) W^T = (h W^T) / rms(x)  with  h = x * w
//
// x F32 [T, D]; h [T, D] in `activation`: x * w in FP32, one rounding; squares F32 [T, P]: numbers whose sum is that of
// the row's x^2. P is 1 for prompts; for answers it is ceil(D / 16): on a GPU number i is the sum over columns 16 i to
// 16 i + 15, in one fixed order. A GPU needs D to be a multiple of 16.
// Source of the norm: Zhang & Sennrich 2019.
#pragma once

#include "ggml-like/ops/batch.h"
#include "ggml-like/weight.h"

namespace quern {

struct Residual {
    Tensor* x = nullptr;  // null behind gather_rows: nobody adds to it any more
    Tensor* h = nullptr;
    Tensor* squares = nullptr;
    Tensor* logits = nullptr;  // of the router, where one was given (linear_add.h)
};

/// The norm that comes after an op that writes the residual stream.
struct NextNorm {
    Tensor* weight;    // F32 [D] (1 added at load where checkpoints store w - 1)
    DType activation;  // of h: F32 or BF16
    StepKind kind;
};

/// The tensors x [tokens, width], h and squares of a node called `name`; checks the norm's shape.
Residual make_residual(Graph& g, const char* op, std::string_view name, int64_t tokens, int64_t width,
                       const NextNorm& next);
/// Throws Error unless h and squares are what an op with a weight of `cols` columns reads.
void check_normed(const char* op, std::string_view name, const Residual& in, int64_t cols);

}  // namespace quern
