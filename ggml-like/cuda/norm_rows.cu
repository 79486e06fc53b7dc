// Norms of many rows: a block a row (defer_rows), a warp a head (gated_norm_rows). Traffic: input once, output once.
#include "ggml-like/cuda/deferred.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/norm_rows.h"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {
namespace {

constexpr int kNormThreads = 256;

__global__ void __launch_bounds__(kNormThreads) defer_kernel(const float* x, Defer d) {
    __shared__ float partial[kNormThreads / 32];
    allow_successor();
    wait_for_predecessor();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * d.columns;
    float sum = 0;
    for (int k = threadIdx.x * 4; k < d.columns; k += kNormThreads * 4) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(x + at + k));
        const float4 n = *reinterpret_cast<const float4*>(d.norm + k);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        *reinterpret_cast<uint2*>(d.h + at + k) =
            make_uint2(pack_bf16(v.x * n.x, v.y * n.y), pack_bf16(v.z * n.z, v.w * n.w));
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kNormThreads / 32; ++w) total += partial[w];
    d.squares[blockIdx.x] = total;
}

__device__ __forceinline__ float load(const bf16* p) {
    const unsigned short v = __ldcg(reinterpret_cast<const unsigned short*>(p));
    return __bfloat162float(*reinterpret_cast<const bf16*>(&v));
}

/// A warp a head of up to 32 * kEach.
template <int kEach>
__global__ void __launch_bounds__(kNormThreads) gated_kernel(GatedNormRows a) {
    allow_successor();
    wait_for_predecessor();
    const int lane = threadIdx.x % 32;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * (kNormThreads / 32) + threadIdx.x / 32;
    if (i >= static_cast<int64_t>(a.rows) * a.heads) return;
    const bf16* o = static_cast<const bf16*>(a.o) + i * a.dim;
    const bf16* z = static_cast<const bf16*>(a.z) + i / a.heads * a.z_ld + i % a.heads * a.dim;
    float value[kEach], gate[kEach], sum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int k = lane + 32 * j;
        value[j] = k < a.dim ? load(o + k) : 0.0f;
        gate[j] = k < a.dim ? load(z + k) : 0.0f;
        sum += value[j] * value[j];
    }
    const float r = rsqrtf(warp_sum(sum) / static_cast<float>(a.dim) + a.eps);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int k = lane + 32 * j;
        if (k < a.dim)
            static_cast<bf16*>(a.h)[i * a.dim + k] =
                __float2bfloat16(value[j] * r * a.norm[k] * (gate[j] / (1.0f + __expf(-gate[j]))));
    }
}

}  // namespace

Defer defer_of(const Tensor& norm, const Tensor& h, const Tensor& squares) {
    const int columns = static_cast<int>(h.shape[1]);
    if (columns % kSquareColumns != 0) unsupported("residual", "a width that is not a multiple of 16");
    return {norm.as<float>(), h.as<bf16>(), squares.as<float>(), columns, static_cast<int>(squares.shape[1])};
}

RowScale scale_of(const Tensor& h, const Tensor& squares, float eps) {
    return {squares.as<float>(), static_cast<int>(squares.shape[1]), 1.0f / static_cast<float>(h.shape[1]),
            eps};
}

void defer_rows(Context& c, const float* x, const Defer& defer, int rows) {
    launch(c, "defer_rows", defer_kernel, rows, kNormThreads, 0, x, defer);
}

void gated_norm_rows(Context& c, const GatedNormRows& a) {
    const int64_t heads = static_cast<int64_t>(a.rows) * a.heads;
    if (a.dim > 256) unsupported("conv_gated_delta_net", "heads of more than 256");
    launch(c, "gated_norm_rows", a.dim <= 128 ? gated_kernel<4> : gated_kernel<8>,
           static_cast<unsigned>((heads + 7) / 8), kNormThreads, 0, a);
}

}  // namespace quern::cuda
