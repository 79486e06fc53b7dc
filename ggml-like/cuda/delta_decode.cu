// Sequences with one row: convolution, gates and the delta rule in one kernel, the state in registers.
//
//   block = (sequence, value head, 32 of its 128 value rows); 4 warps, a half warp a row of S, 8 floats of it a lane
//   the 256 q and k channels are convolved by every block of a key head (L2 hits); v channels once
//
// Traffic: S read and written once (4.2 MB a sequence of the 35B's layer). Limit: latency; S and the convolution's window
// are loaded before the wait for the predecessor, because only the previous step wrote them.
#include "ggml-like/cuda/delta.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {
namespace {

constexpr int kDim = 128, kTaps = 4, kRows = 32, kBlock = 128;

/// The convolution of one channel: its window and taps before the wait, its input after.
struct Channel {
    float past[kTaps - 1];
    float4 taps;

    __device__ __forceinline__ void early(const DeltaStep& d, int channel, int64_t slot, int position, int channels) {
        const bf16* ring = static_cast<const bf16*>(d.conv_state) + slot * d.ring * channels + channel;
        taps = *reinterpret_cast<const float4*>(d.conv + channel * kTaps);
#pragma unroll
        for (int j = 0; j < kTaps - 1; ++j) {
            const int p = position - (kTaps - 1) + j;
            past[j] = p >= 0 ? __bfloat162float(ring[static_cast<int64_t>(p % d.ring) * channels]) : 0.0f;
        }
    }
    /// SiLU of the sum, rounded as it would be in memory.
    __device__ __forceinline__ float value(float now) const {
        const float sum = taps.x * past[0] + taps.y * past[1] + taps.z * past[2] + taps.w * now;
        return __bfloat162float(__float2bfloat16(sum / (1.0f + __expf(-sum))));
    }
};

__device__ __forceinline__ bf16 load_row(const bf16* p) {
    const unsigned short v = __ldcg(reinterpret_cast<const unsigned short*>(p));
    return *reinterpret_cast<const bf16*>(&v);
}

/// Sums of three values over the block.
__device__ __forceinline__ float3 block_sum(float a, float b, float c, float (&partial)[3][4]) {
    a = warp_sum(a), b = warp_sum(b), c = warp_sum(c);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) partial[0][warp] = a, partial[1][warp] = b, partial[2][warp] = c;
    __syncthreads();
    const auto all = [&](int i) { return partial[i][0] + partial[i][1] + partial[i][2] + partial[i][3]; };
    return {all(0), all(1), all(2)};
}

__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
    for (int d = 8; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}
__device__ __forceinline__ float4 update(const float4& s, float decay, const float4& k, float u) {
    return {decay * s.x + u * k.x, decay * s.y + u * k.y, decay * s.z + u * k.z, decay * s.w + u * k.w};
}

__global__ void __launch_bounds__(kBlock) decode_kernel(DeltaStep d) {
    __shared__ __align__(16) float q[kDim], k[kDim];
    __shared__ float v[kRows], partial[3][4];
    constexpr int kSlices = kDim / kRows, kPasses = kRows / 8;
    const int sequence = blockIdx.y, head = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
    const int group = d.value_heads / d.key_heads, key_head = head / group;
    const int channels = 2 * d.key_heads * kDim + d.value_heads * kDim, tid = threadIdx.x;
    allow_successor();

    const int row = d.start[sequence];
    const bool active = d.start[sequence + 1] == row + 1;
    const int position = active ? d.positions[row] : 0;
    const int64_t slot = d.slots[sequence];
    const int q_channel = key_head * kDim + tid, k_channel = q_channel + d.key_heads * kDim;
    const int v_channel = 2 * d.key_heads * kDim + head * kDim + slice * kRows + (tid & (kRows - 1));
    Channel cq, ck, cv;
    cq.early(d, q_channel, slot, position, channels);
    ck.early(d, k_channel, slot, position, channels);
    cv.early(d, v_channel, slot, position, channels);
    const int half = tid % 32 / 16, l = tid % 16, first = slice * kRows + tid / 32 * 8 + half;
    float* state = d.delta + ((slot * d.value_heads + head) * kDim + first) * kDim + 4 * l;
    float4 s[kPasses][2];
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            s[i][h] = position > 0 ? *reinterpret_cast<const float4*>(state + 2 * i * kDim + 64 * h) : float4{};
    const float rate = d.decay_rate[head], bias = d.dt_bias[head];
    wait_for_predecessor();
    if (!active) return;

    const bf16* u = static_cast<const bf16*>(d.u) + row * d.u_ld;
    const bf16 uq = load_row(u + q_channel), uk = load_row(u + k_channel), uv = load_row(u + v_channel);
    const float a = __bfloat162float(load_row(static_cast<const bf16*>(d.a) + row * d.ab_ld + head)) + bias;
    const float b = __bfloat162float(load_row(static_cast<const bf16*>(d.b) + row * d.ab_ld + head));
    const float xq = cq.value(__bfloat162float(uq)), xk = ck.value(__bfloat162float(uk));
    const float3 sums = block_sum(xq * xq, xk * xk, xq * xk, partial);
    const float rq = rsqrtf(sums.x + 1e-6f) * rsqrtf(static_cast<float>(kDim)), rk = rsqrtf(sums.y + 1e-6f);
    q[tid] = xq * rq;
    k[tid] = xk * rk;
    if (tid < kRows) v[tid] = cv.value(__bfloat162float(uv));
    const float qk = sums.z * rq * rk;
    const float softplus = a > 20.0f ? a : log1pf(__expf(a));
    const float decay = __expf(rate * softplus), beta = 1.0f / (1.0f + __expf(-b));
    __syncthreads();

    const float4 k0 = *reinterpret_cast<const float4*>(k + 4 * l), k1 = *reinterpret_cast<const float4*>(k + 64 + 4 * l);
    const float4 q0 = *reinterpret_cast<const float4*>(q + 4 * l), q1 = *reinterpret_cast<const float4*>(q + 64 + 4 * l);
    bf16* o = static_cast<bf16*>(d.o) + (static_cast<int64_t>(row) * d.value_heads + head) * kDim + first;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const float sk = half_warp_sum(dot(s[i][0], k0) + dot(s[i][1], k1));
        const float sq = half_warp_sum(dot(s[i][0], q0) + dot(s[i][1], q1));
        const float delta = beta * (v[first - slice * kRows + 2 * i] - decay * sk);
        *reinterpret_cast<float4*>(state + 2 * i * kDim) = update(s[i][0], decay, k0, delta);
        *reinterpret_cast<float4*>(state + 2 * i * kDim + 64) = update(s[i][1], decay, k1, delta);
        if (l == 0) o[2 * i] = __float2bfloat16(decay * sq + qk * delta);
    }
    // The ring's row of this position: nobody reads it in this step.
    bf16* ring = static_cast<bf16*>(d.conv_state) + (slot * d.ring + position % d.ring) * channels;
    if (head % group == 0 && slice == 0) ring[q_channel] = uq, ring[k_channel] = uk;
    if (tid < kRows) ring[v_channel] = uv;
}

}  // namespace

void delta_decode(Context& c, const DeltaStep& d) {
    launch(c, "conv_gated_delta_net", decode_kernel, dim3(d.value_heads * (kDim / kRows), d.sequences), kBlock, 0, d);
}

}  // namespace quern::cuda
