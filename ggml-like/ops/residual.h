// The residual stream between two ops, and the RMSNorm after it, which is split: the op that writes x also writes
// h = x * w and the sums of squares; the op that reads h scales its product by 1 / rms.
//
//   norm(x) = x * w / rms(x),  rms(x) = sqrt(mean(x^2) + eps);  norm(x) W^T = (h W^T) / rms(x)  with  h = x * w
//
// x F32 [T, D]; h [T, D] in `activation`: x * w in FP32, one rounding; squares F32 [T, P]: P partial sums of the row's
// x^2. P is ceil(D / 16) for answers. For prompts it is 1, but ceil(D / 8) where linear_add.h says so. On a GPU number i is the sum
// over neighbouring columns, 16 or 8, in one fixed order; the CPU writes the whole sum first, then zeros. A GPU needs D to be a
// multiple of 16.
// Source of the norm: Zhang & Sennrich 2019.
#pragma once

#include "ggml-like/ops/batch.h"
#include "ggml-like/weight.h"

namespace quern {

struct Residual {
    Tensor* x = nullptr;  // null after gather_rows: nothing is added to it any more
    Tensor* h = nullptr;
    Tensor* squares = nullptr;
    Tensor* logits = nullptr;  // the router's, where one was given (linear_add.h)
};

/// The norm that comes after an op that writes the residual stream.
struct NextNorm {
    Tensor* weight;    // F32 [D] (1 added at load where checkpoints store w - 1)
    DType activation;  // of h: F32 or BF16
    StepKind kind;
};

/// What a product of which each rank has a part does about the sum over ranks.
enum class Sums : uint8_t {
    none,  // nothing: there is one rank, or somebody else adds up
    own,  // of prompts x of some rows only, the backend's choice and the same in all nodes of a step; h and squares of all
    whole,  // x, h and squares of all rows
};

struct OverRanks {
    Tensor* zeros = nullptr;  // F32, as x: what a part is added to; null: Sums::none
    bool whole = true;        // else Sums::own

    Sums sums() const { return zeros == nullptr ? Sums::none : whole ? Sums::whole : Sums::own; }
};

/// The tensors x [tokens, width], h and squares of a node called `name`; checks the norm's shape. in_parts: of
/// prompts, P = ceil(D / 8).
Residual make_residual(Graph& g, const char* op, std::string_view name, int64_t tokens, int64_t width,
                       const NextNorm& next, bool in_parts = false);
/// The logits of a router [E + 1, width], as linear_add.h has them.
Tensor* make_router_logits(Graph& g, std::string_view name, int64_t tokens, const Weight& router,
                           const NextNorm& next);
/// Throws Error unless `zeros`, if not null, are what a product over ranks may be given beside `residual`.
void check_zeros(const char* op, std::string_view name, const Tensor* zeros, const Tensor& residual);
/// Throws Error unless h and squares are what an op with a weight of `cols` columns reads.
void check_normed(const char* op, std::string_view name, const Residual& in, int64_t cols);

}  // namespace quern
