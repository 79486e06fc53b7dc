// What becomes of a sum of an answer step (step_product.h): the arithmetic that all kernels share, spelled out so that a
// compiler fuses no product and sum in one of them only.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/step_product.h"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// Row `row` of the part for row n of x; `up`: the other sum of paired rows. By 16 neighbouring lanes for the 16 rows of
/// a tile where there is a residual.
__device__ __forceinline__ void finish_sum(const StepOutput& out, int n, int row, float sum, float up,
                                           float scale) {
    const int64_t to = n * out.ld + row;
    if (out.paired) {
        static_cast<bf16*>(out.y)[to] = gated(scaled(sum, scale), scaled(up, scale));
    } else if (out.residual != nullptr) {
        const int column = out.row_begin + row;
        const float x = add_residual(__ldcg(out.residual + to), sum);
        static_cast<float*>(out.y)[to] = x;
        defer_column(out.defer, n, column, x, out.defer.norm[column]);
    } else if (out.f32) {
        static_cast<float*>(out.y)[to] = scaled(sum, scale);
    } else {
        static_cast<bf16*>(out.y)[to] = __float2bfloat16(scaled(sum, scale));
    }
}

}  // namespace quern::cuda::linear
