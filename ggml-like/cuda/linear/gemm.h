// Matrix products of packed weights with rows of prompts (tensor cores, tiles in shared memory).
//
// All activations are BF16, rows 16-byte aligned, ld in elements and a multiple of 8; columns beyond `cols`
// up to the next multiple of 64 may hold anything finite only if they exist in memory: reads past a row's
// `cols` are masked. Sums in FP32, one rounding at the store. Work is found from device memory; the host
// never waits.
//
// A row has the same bits however many rows there are: a sum runs over the columns in their order, or, of a matrix that is
// split, over the two halves of the columns, whose sums are added (with mma.sync: over every fourth chunk of 64 columns,
// four sums). Whether it is split depends on the matrix alone.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

struct GemmOutput {
    void* y;  // [tokens, ld]
    int64_t ld;
    bool f32 = false;  // else BF16
    const float* residual =
        nullptr;  // F32 [tokens, residual_ld], added before the store. y may be the same memory.
    int64_t residual_ld = 0;
    RowScale scale{};  // of sums, before the residual; one number a row
    Defer defer{};     // of y in F32, with squares in parts; h null: nothing. Parts of w are whole tiles then
};

/// never: as the experts' products add.
enum class Split { never, by_matrix };

/// y = x W^T (+ residual), all parts of w.
void gemm(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens, const GemmOutput& out,
          Split split);

struct GatedOutput {
    bf16* y;
    int64_t ld;
    RowScale scale;  // of sums
};

/// w in paired order, F = rows / 2: y BF16 [tokens, ldy] = silu(gate x) * (up x). Never split.
void gemm_paired(Context& context, const Packed& w, const void* x, int64_t ldx, int tokens,
                 const GatedOutput& out);

}  // namespace quern::cuda::linear
