// How results of products with many rows reach memory.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/gemm_task.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// Eight weights of the norm that follows, from row `row` of the matrix on; zeros if none follows, or there is no such row.
struct NormOfEight {
    float4 low{}, high{};

    __device__ __forceinline__ NormOfEight(const GemmTask& task, int row) {
        if (task.defer.h == nullptr || row >= task.rows) return;
        const auto* from = reinterpret_cast<const float4*>(task.defer.norm + task.defer_begin + row);
        low = from[0], high = from[1];
    }
};

/// Adds the residual and stores 8 neighbours of row n of y, from `row` on, of which `there` exist; by 16 bytes where the place
/// allows it. `norm`: of these rows.
__device__ __forceinline__ void store_row(const GemmTask& task, float (&v)[8], int64_t n, int row, int there,
                                          const NormOfEight& norm) {
    if (task.residual != nullptr) {
        const float* residual = task.residual + n * task.residual_ld + row;
        if (there >= 8 && reinterpret_cast<uintptr_t>(residual) % 16 == 0) {
            const float4 r[2] = {reinterpret_cast<const float4*>(residual)[0],
                                 reinterpret_cast<const float4*>(residual)[1]};
            v[0] += r[0].x, v[1] += r[0].y, v[2] += r[0].z, v[3] += r[0].w;
            v[4] += r[1].x, v[5] += r[1].y, v[6] += r[1].z, v[7] += r[1].w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += i < there ? residual[i] : 0.0f;
        }
    }
    const int64_t at = n * task.ldy + row;
    if (task.f32) {
        if (task.defer.h != nullptr && there >= 8)
            defer_eight(task.defer, n, task.defer_begin + row, v, norm.low, norm.high);
        float* y = static_cast<float*>(task.y) + at;
        if (there >= 8 && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
            reinterpret_cast<float4*>(y)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(y)[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < there) y[i] = v[i];
        }
        return;
    }
    bf16* y = static_cast<bf16*>(task.y) + at;
    if (there >= 8 && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
        *reinterpret_cast<uint4*>(y) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                                  pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < there) y[i] = __float2bfloat16_rn(v[i]);
    }
}

}  // namespace quern::cuda::linear
