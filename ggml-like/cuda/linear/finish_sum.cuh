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

/// Four BF16 or F32 numbers to `to`, of which `there` exist.
__device__ __forceinline__ void store_numbers(bf16* to, const float (&v)[4], int there) {
    if (there >= 4 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < there) to[i] = __float2bfloat16(v[i]);
}
__device__ __forceinline__ void store_numbers(float* to, const float (&v)[4], int there) {
    if (there >= 4 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < there) to[i] = v[i];
}

/// What finish_four adds to its sums and multiplies them with, where there is a residual: may be loaded before the sums are there.
struct Beside {
    float4 residual, norm;
};
__device__ __forceinline__ Beside load_beside(const StepOutput& out, int n, int row) {
    if (out.residual == nullptr) return {};
    return {__ldcg(reinterpret_cast<const float4*>(out.residual + n * out.ld + row)),
            *reinterpret_cast<const float4*>(out.defer.norm + out.row_begin + row)};
}

/// finish_sum of rows row .. row + 3, of which `there` exist. With a residual all do, and four neighbouring lanes have the
/// rows of a tile.
__device__ __forceinline__ void finish_four(const StepOutput& out, int n, int row, const float (&sum)[4],
                                            const float (&up)[4], float scale, int there,
                                            const Beside& beside) {
    const int64_t to = n * out.ld + row;
    if (out.residual != nullptr) {
        const float4& before = beside.residual;
        const float4 x = make_float4(add_residual(before.x, sum[0]), add_residual(before.y, sum[1]),
                                     add_residual(before.z, sum[2]), add_residual(before.w, sum[3]));
        *reinterpret_cast<float4*>(static_cast<float*>(out.y) + to) = x;
        return defer_four(out.defer, n, out.row_begin + row, x, beside.norm);
    }
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = scaled(sum[i], scale);
        if (out.paired) v[i] = __bfloat162float(gated(v[i], scaled(up[i], scale)));
    }
    if (out.f32)
        store_numbers(static_cast<float*>(out.y) + to, v, there);
    else
        store_numbers(static_cast<bf16*>(out.y) + to, v, there);
}

}  // namespace quern::cuda::linear
