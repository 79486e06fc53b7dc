// The gated norm of many rows. A warp has a head of a row: lane l elements l, l + 32, ...; no shared memory.
// Traffic: o, z and h once. Bound: bytes.
#include "ggml-like/cuda/delta/gated_norm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kNormThreads = 256;

__device__ __forceinline__ float load(const bf16* p) {
    const unsigned short v = __ldcg(reinterpret_cast<const unsigned short*>(p));
    return __bfloat162float(*reinterpret_cast<const bf16*>(&v));
}

/// Heads of up to 32 * kEach.
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

void gated_norm_rows(Context& c, const GatedNormRows& a) {
    const int64_t heads = static_cast<int64_t>(a.rows) * a.heads;
    if (a.dim > 256) unsupported("conv_gated_delta_net", "heads of more than 256");
    launch(c, "gated_norm_rows", a.dim <= 128 ? gated_kernel<4> : gated_kernel<8>,
           static_cast<unsigned>((heads + 7) / 8), kNormThreads, 0, a);
}

}  // namespace quern::cuda::delta
