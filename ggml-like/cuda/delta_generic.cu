// Any shape, row by row: the plain form for small models.
//   convolve: a thread a channel and sequence, its rows in order (so nobody else touches its ring)
//   recur: a block a sequence and value head, a thread a value row, the state in memory
#include "ggml-like/cuda/delta.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {
namespace {

constexpr int kBlock = 128, kMostTaps = 8, kMostDim = 256;

__device__ __forceinline__ float load(const void* p, int64_t i) {
    const unsigned short v = __ldcg(static_cast<const unsigned short*>(p) + i);
    return __bfloat162float(*reinterpret_cast<const bf16*>(&v));
}

__global__ void __launch_bounds__(kBlock) convolve(DeltaStep d, int channels) {
    allow_successor();
    wait_for_predecessor();
    const int channel = blockIdx.x * kBlock + threadIdx.x, sequence = blockIdx.y;
    const int begin = d.start[sequence], end = d.start[sequence + 1];
    if (channel >= channels || begin == end) return;
    const int position = d.positions[begin];
    bf16* ring = static_cast<bf16*>(d.conv_state) +
                 static_cast<int64_t>(d.slots[sequence]) * d.ring * channels + channel;
    float window[kMostTaps] = {};
    for (int j = 0; j + 1 < d.taps; ++j) {
        const int p = position - (d.taps - 1) + j;
        if (p >= 0) window[j] = __bfloat162float(ring[static_cast<int64_t>(p % d.ring) * channels]);
    }
    for (int r = begin; r < end; ++r) {
        window[d.taps - 1] = load(d.u, r * d.u_ld + channel);
        float sum = 0;
        for (int j = 0; j < d.taps; ++j) sum += d.conv[channel * d.taps + j] * window[j];
        static_cast<bf16*>(d.x)[static_cast<int64_t>(r) * channels + channel] =
            __float2bfloat16(sum / (1.0f + __expf(-sum)));
        ring[static_cast<int64_t>((position + r - begin) % d.ring) * channels] =
            __float2bfloat16(window[d.taps - 1]);
        for (int j = 0; j + 1 < d.taps; ++j) window[j] = window[j + 1];
    }
}

/// x / sqrt(sum x^2 + 1e-6) * scale into shared memory.
__device__ void unit(const void* x, int64_t at, int dim, float scale, float* to,
                     float (&partial)[kBlock / 32]) {
    float mine = 0;
    for (int i = threadIdx.x; i < dim; i += kBlock) {
        to[i] = load(x, at + i);
        mine += to[i] * to[i];
    }
    mine = warp_sum(mine);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = mine;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < kBlock / 32; ++w) sum += partial[w];
    const float r = rsqrtf(sum + 1e-6f) * scale;
    for (int i = threadIdx.x; i < dim; i += kBlock) to[i] *= r;
    __syncthreads();
}

__global__ void __launch_bounds__(kBlock) recur(DeltaStep d, int channels) {
    __shared__ float q[kMostDim], k[kMostDim], partial[kBlock / 32];
    allow_successor();
    wait_for_predecessor();
    const int head = blockIdx.x, sequence = blockIdx.y, key_head = head / (d.value_heads / d.key_heads);
    const int begin = d.start[sequence], end = d.start[sequence + 1], dk = d.key_dim, dv = d.value_dim;
    if (begin == end) return;
    float* state = d.delta + (static_cast<int64_t>(d.slots[sequence]) * d.value_heads + head) * dv * dk;
    const bool fresh = d.positions[begin] == 0;
    for (int r = begin; r < end; ++r) {
        const int64_t at = static_cast<int64_t>(r) * channels;
        unit(d.x, at + key_head * dk, dk, rsqrtf(static_cast<float>(dk)), q, partial);
        unit(d.x, at + (d.key_heads + key_head) * dk, dk, 1.0f, k, partial);
        const float a = load(d.a, r * d.ab_ld + head) + d.dt_bias[head];
        const float decay = expf(d.decay_rate[head] * (a > 20.0f ? a : log1pf(expf(a))));
        const float beta = 1.0f / (1.0f + expf(-load(d.b, r * d.ab_ld + head)));
        for (int v = threadIdx.x; v < dv; v += kBlock) {
            float* row = state + static_cast<int64_t>(v) * dk;
            const bool zero = fresh && r == begin;
            float sk = 0, o = 0;
            for (int i = 0; i < dk; ++i) sk += zero ? 0.0f : decay * row[i] * k[i];
            const float delta = beta * (load(d.x, at + 2 * d.key_heads * dk + head * dv + v) - sk);
            for (int i = 0; i < dk; ++i) {
                const float s = (zero ? 0.0f : decay * row[i]) + delta * k[i];
                row[i] = s;
                o += s * q[i];
            }
            static_cast<bf16*>(d.o)[(static_cast<int64_t>(r) * d.value_heads + head) * dv + v] =
                __float2bfloat16(o);
        }
        __syncthreads();
    }
}

}  // namespace

void delta_generic(Context& c, const DeltaStep& d) {
    const int channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim;
    launch(c, "conv_gated_delta_net", convolve, dim3((channels + kBlock - 1) / kBlock, d.sequences), kBlock,
           0, d, channels);
    launch(c, "conv_gated_delta_net", recur, dim3(d.value_heads, d.sequences), kBlock, 0, d, channels);
}

}  // namespace quern::cuda
