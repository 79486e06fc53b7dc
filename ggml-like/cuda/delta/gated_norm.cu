// The gated norm of many rows. A block has a row, a warp a head at a time, a lane 4 neighbours (or 8); no shared memory.
// Traffic: o, z and h once. Bound: bytes.
#include "ggml-like/cuda/delta/gated_norm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kNormThreads = 256;

/// kEach neighbours of n elements from `at` on; zeros beyond them.
template <int kEach>
__device__ __forceinline__ void load(const bf16* from, int at, int n, float (&to)[kEach]) {
    const auto* p = reinterpret_cast<const uint16_t*>(from + at);
    uint16_t bits[kEach] = {};
    if (at + kEach <= n && reinterpret_cast<uintptr_t>(p) % 8 == 0) {
#pragma unroll
        for (int j = 0; j < kEach; j += 4) {
            const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p + j));
            bits[j] = v.x & 0xffff, bits[j + 1] = v.x >> 16, bits[j + 2] = v.y & 0xffff,
            bits[j + 3] = v.y >> 16;
        }
    } else {
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            if (at + j < n) bits[j] = __ldcg(p + j);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) to[j] = as_float(bits[j]);
}

/// Heads of up to 32 * kEach.
template <int kEach>
__global__ void __launch_bounds__(kNormThreads) gated_kernel(GatedNormRows a) {
    allow_successor();
    wait_for_predecessor();
    const int at = threadIdx.x % 32 * kEach;
    const int64_t row = blockIdx.x;
#pragma unroll 2
    for (int head = threadIdx.x / 32; head < a.heads; head += kNormThreads / 32) {
        const int64_t first = (row * a.heads + head) * a.dim;
        float value[kEach], gate[kEach], sum = 0;
        load(static_cast<const bf16*>(a.o) + first, at, a.dim, value);
        load(static_cast<const bf16*>(a.z) + row * a.z_ld + head * a.dim, at, a.dim, gate);
#pragma unroll
        for (const float v : value) sum += v * v;
        const float r = rsqrtf(warp_sum(sum) / static_cast<float>(a.dim) + a.eps);
        bf16* h = static_cast<bf16*>(a.h) + first + at;
        float out[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            out[j] = value[j] * r * (at + j < a.dim ? a.norm[at + j] : 0.0f) *
                     __fdividef(gate[j], 1.0f + __expf(-gate[j]));
        if (at + kEach <= a.dim && reinterpret_cast<uintptr_t>(h) % 8 == 0) {
#pragma unroll
            for (int j = 0; j < kEach; j += 4)
                *reinterpret_cast<uint2*>(h + j) =
                    make_uint2(pack_bf16(out[j], out[j + 1]), pack_bf16(out[j + 2], out[j + 3]));
        } else {
#pragma unroll
            for (int j = 0; j < kEach; ++j)
                if (at + j < a.dim) h[j] = __float2bfloat16(out[j]);
        }
    }
}

}  // namespace

void gated_norm_rows(Context& c, const GatedNormRows& a) {
    if (a.dim > 256) unsupported("conv_gated_delta_net", "heads of more than 256");
    launch(c, "gated_norm_rows", a.dim <= 128 ? gated_kernel<4> : gated_kernel<8>,
           static_cast<unsigned>(a.rows), kNormThreads, 0, a);
}

}  // namespace quern::cuda::delta
