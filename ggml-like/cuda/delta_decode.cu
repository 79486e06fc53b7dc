// Sequences with one row: convolution, gates, the delta rule, norm and gate in one kernel, the state in
// registers.
//
//   block = (sequence, value head); 8 warps, a half warp a row of S, 8 floats of it a lane, 8 rows; where
//   there are multiprocessors enough, four blocks a head, which give each other their outputs for the norm
//   the 256 q and k channels are convolved by every value head of a key head (L2 hits); v channels once
//
// Traffic: S read and written once (4.2 MB a sequence of the 35B's layer). Limit: latency; S and the
// convolution's window are loaded before the wait for the predecessor, because only the previous step wrote
// them. Two blocks a multiprocessor: 8 sequences are under way at once.
#include "ggml-like/cuda/cluster.cuh"
#include "ggml-like/cuda/delta.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {
namespace {

constexpr int kDim = 128, kTaps = 4, kBlock = 256, kWarps = kBlock / 32;
static_assert(kBlock == 2 * kDim, "a thread a channel of q and k");

/// The convolution of one channel: its window and taps before the wait, its input after.
struct Channel {
    float past[kTaps - 1];
    float4 taps;

    __device__ __forceinline__ void early(const DeltaStep& d, int channel, int64_t slot, int position,
                                          int place, int channels) {
        const bf16* ring = static_cast<const bf16*>(d.conv_state) + slot * d.ring * channels + channel;
        taps = *reinterpret_cast<const float4*>(d.conv + channel * kTaps);
#pragma unroll
        for (int j = 0; j < kTaps - 1; ++j) {
            const int before = kTaps - 1 - j, p = place >= before ? place - before : place - before + d.ring;
            past[j] = position >= before ? __bfloat162float(ring[static_cast<int64_t>(p) * channels]) : 0.0f;
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

__device__ __forceinline__ float4 load4(const float* shared, int at) {
    return *reinterpret_cast<const float4*>(shared + at);
}

/// One thread's output to all blocks of the cluster.
template <int kSplit>
__device__ __forceinline__ void share_output(float* to, float value) {
    if constexpr (kSplit == 1) {
        *to = value;
    } else {
#pragma unroll
        for (int rank = 0; rank < kSplit; ++rank) store_to_peer(shared_address(to), rank, value);
    }
}

/// kSplit blocks, a cluster, share a head's rows of S.
template <int kSplit>
__device__ __forceinline__ void decode(const DeltaStep& d) {
    constexpr int kOwn = kDim / kSplit, kRows = kOwn / kWarps, kPasses = kRows / 2;
    constexpr int kTogether = 2, kLanes = 8 / kTogether;  // passes whose sums are made at once
    __shared__ __align__(16) float qk[2 * kDim], v[kDim], o[kDim];
    __shared__ float squares[kWarps];
    const int sequence = blockIdx.y, head = blockIdx.x / kSplit, share = blockIdx.x % kSplit,
              tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int group = quotient(d.value_heads, d.key_heads), key_head = quotient(head, group);
    const int keys = d.key_heads * kDim, channels = 2 * keys + d.value_heads * kDim;
    allow_successor();
    if constexpr (kSplit > 1) cluster_arrive();

    const int row = d.start[sequence];
    const bool active = d.start[sequence + 1] == row + 1;
    const int position = active ? d.positions[row] : 0;
    const int place = position - quotient(position, d.ring) * d.ring;  // of this row in the ring
    const int64_t slot = d.slots[sequence];
    const int half = lane / 16, l = lane % 16, first = share * kOwn + warp * kRows + half;
    float* state = d.delta + ((slot * d.value_heads + head) * kDim + first) * kDim + 4 * l;
    float4 s[kPasses][2];
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            s[i][h] =
                position > 0 ? *reinterpret_cast<const float4*>(state + 2 * i * kDim + 64 * h) : float4{};
    // Threads 0..127: a channel of q, those with an output of this block one of v; the others: a channel of
    // k.
    const bool is_q = tid < kDim, has_output = is_q && tid / kOwn == share;
    const int element = tid % kDim, qk_channel = key_head * kDim + (is_q ? 0 : keys) + element;
    const int v_channel = 2 * keys + head * kDim + element;
    Channel of_qk, of_v;
    of_qk.early(d, qk_channel, slot, position, place, channels);
    if (has_output) of_v.early(d, v_channel, slot, position, place, channels);
    const float rate = d.decay_rate[head], bias = d.dt_bias[head], norm = d.norm[element];
    if constexpr (kSplit > 1) cluster_wait();  // all of it have begun
    wait_for_predecessor();
    if (!active) return;

    const bf16* u = static_cast<const bf16*>(d.u) + row * d.u_ld;
    const bf16 u_qk = load_row(u + qk_channel), u_v = has_output ? load_row(u + v_channel) : bf16{};
    const float a = __bfloat162float(load_row(static_cast<const bf16*>(d.a) + row * d.ab_ld + head)) + bias;
    const float b = __bfloat162float(load_row(static_cast<const bf16*>(d.b) + row * d.ab_ld + head));
    const float z =
        has_output
            ? __bfloat162float(load_row(static_cast<const bf16*>(d.z) + row * d.z_ld + head * kDim + element))
            : 0.0f;
    const float x = of_qk.value(__bfloat162float(u_qk));
    qk[tid] = x;
    if (has_output) v[element] = of_v.value(__bfloat162float(u_v));
    const float softplus = a > 20.0f ? a : log1pf(__expf(a));
    const float decay = __expf(rate * softplus), beta = 1.0f / (1.0f + __expf(-b));
    const float square = warp_sum(x * x);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    const auto four = [](const float* p) { return (p[0] + p[1]) + (p[2] + p[3]); };
    const float rq = rsqrtf(four(squares) + 1e-6f) * rsqrtf(static_cast<float>(kDim));
    const float rk = rsqrtf(four(squares + 4) + 1e-6f);
    const float4 q0 = load4(qk, 4 * l), q1 = load4(qk, 64 + 4 * l);
    const float4 k0 = load4(qk, kDim + 4 * l), k1 = load4(qk, kDim + 64 + 4 * l);
    const float product = half_warp_sum(dot(q0, k0) + dot(q1, k1)) * rq * rk;

#pragma unroll
    for (int begin = 0; begin < kPasses; begin += kTogether) {
        float sums[2 * kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const float4(&rows)[2] = s[begin + j];
            sums[j] = dot(rows[0], k0) + dot(rows[1], k1);
            sums[kTogether + j] = dot(rows[0], q0) + dot(rows[1], q1);
        }
        // Of kLanes lanes each: those below 8 have s k of a pass and make its delta, the others s q and its
        // output.
        const float sum = lane_sums<16>(sums);
        const int own = first + 2 * (begin + l / kLanes % kTogether);
        const float delta_of_own = beta * (v[own] - decay * (sum * rk));
        const float delta = __shfl_sync(0xffffffffu, delta_of_own, lane & ~8);
        if (l >= 8 && l % kLanes == 0)
            share_output<kSplit>(&o[own],
                                 __bfloat162float(__float2bfloat16(decay * (sum * rq) + product * delta)));
        // before the stores that nobody of the cluster waits for
        if (kSplit > 1 && begin + kTogether == kPasses) cluster_arrive();
        const float scaled = delta * rk;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int i = begin + j;
            const float u = __shfl_sync(0xffffffffu, scaled, (lane & 16) + j * kLanes);
            *reinterpret_cast<float4*>(state + 2 * i * kDim) = update(s[i][0], decay, k0, u);
            *reinterpret_cast<float4*>(state + 2 * i * kDim + 64) = update(s[i][1], decay, k1, u);
        }
    }
    // The ring's row of this position: nobody reads it in this step.
    bf16* ring = static_cast<bf16*>(d.conv_state) + (slot * d.ring + place) * channels;
    if (key_head * group == head && share == 0) ring[qk_channel] = u_qk;
    if (has_output) ring[v_channel] = u_v;
    if constexpr (kSplit > 1)
        cluster_wait();
    else
        __syncthreads();
    if (!has_output) return;

    const float4 mine = load4(o, 4 * lane);
    const float r = rsqrtf(warp_sum(dot(mine, mine)) / static_cast<float>(kDim) + d.eps);
    const int64_t at = (static_cast<int64_t>(row) * d.value_heads + head) * kDim + element;
    static_cast<bf16*>(d.y)[at] = __float2bfloat16(o[element] * r * norm * (z / (1.0f + __expf(-z))));
    if (d.o != nullptr) static_cast<bf16*>(d.o)[at] = __float2bfloat16(o[element]);
}

__global__ void __launch_bounds__(kBlock, 2) decode_kernel(DeltaStep d) { decode<1>(d); }

constexpr int kSplitBlocks = 4;
CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kBlock, 2) decode_split_kernel(DeltaStep d) { decode<kSplitBlocks>(d); }

}  // namespace

void delta_decode(Context& c, const DeltaStep& d) {
    const int heads = d.value_heads * d.sequences;
    if (c.capability >= 90 && heads * kSplitBlocks <= c.sms)
        return launch(c, "conv_gated_delta_net", decode_split_kernel,
                      dim3(d.value_heads * kSplitBlocks, d.sequences), kBlock, 0, d);
    launch(c, "conv_gated_delta_net", decode_kernel, dim3(d.value_heads, d.sequences), kBlock, 0, d);
}

}  // namespace quern::cuda
