// Products of packed weights with 1 to 64 rows of an answer step that dense_one.cuh and dense_rows.cuh do not take. A row
// has the bits that it has there: sums are made of the same splits in the same order.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/pack/packed.h"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

inline constexpr int kStepRows = 64;

/// x BF16 [rows, cols], rows ld apart: a multiple of 8.
struct StepRows {
    const bf16* x;
    int64_t ld;
    int rows;
};

/// What becomes of the sums of a part's rows, of which y and residual are at the first.
struct StepOutput {
    void* y;  // [rows, ld]
    int64_t ld;
    bool f32 = false;     // else BF16
    bool paired = false;  // silu(gate) * up, BF16
    const float* residual =
        nullptr;        // F32 [rows, ld]: added, and h and squares of the result are written, too
    int row_begin = 0;  // the column of h that y begins with
    RowScale scale{};   // of sums
    Defer defer{};      // with a residual
};

constexpr bool takes_step_product(AnswerProduct product) { return product >= AnswerProduct::step; }
/// `part` of w by such a product. peers: the sums, which a residual is added to, are over ranks (product_sums); or null. Throws
/// Error(device) for more than kStepRows rows.
void step_product(Context& context, AnswerProduct product, const Part& part, const Packed& w,
                  const StepRows& x, const StepOutput& out, const comm::Peers* peers = nullptr);
/// The same for FP8 and NVFP4 by warps that hold their columns of x; out: of a norm, neither paired nor with a residual.
void dense_held(Context& context, const Part& part, const Packed& w, const StepRows& x,
                const StepOutput& out);
/// The same by products of warpgroups: (low) quarters, lone, whole or rounds.
void gemm_answer(Context& context, AnswerProduct product, const Part& part, const Packed& w,
                 const StepRows& x, const StepOutput& out, const comm::Peers* peers);

}  // namespace quern::cuda::linear
