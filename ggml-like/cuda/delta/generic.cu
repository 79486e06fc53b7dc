// The gated delta rule for any shape, row by row: the plain form for small models. Three kernels:
//
//   convolve   a thread a channel and sequence, which has that channel of the ring to itself; its rows in order
//   commit     block = (sequence, value head); a warp a row of S: applies the journal's committed entries
//   recur      block = (sequence, value head); a thread a row of S, in memory. Sequences that journal work on the copy
//              that `commit` has made
//
// Shared memory: of recur q and k of the row. Bound: S read and written in every row.
#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/delta/rule.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kBlock = 128, kMaxTaps = 8, kMaxDim = 256;

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
    float window[kMaxTaps] = {};
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

/// to = x / sqrt(sum x^2 + 1e-6) * scale, in shared memory; a barrier at the end.
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

/// A lane an element of S: the committed entries in order.
__global__ void __launch_bounds__(kBlock) commit(DeltaStep d) {
    allow_successor();
    wait_for_predecessor();
    const int head = blockIdx.x, sequence = blockIdx.y, key_head = head / (d.value_heads / d.key_heads);
    const int begin = d.start[sequence], dk = d.key_dim, dv = d.value_dim;
    if (begin == d.start[sequence + 1]) return;
    const bool fresh = d.positions[begin] == 0, journaling = d.journal.journals(sequence);
    const int committed = d.journal.committed[sequence];
    if (committed == 0 && !fresh && !journaling) return;
    const int64_t slot = d.slots[sequence], first = slot * d.journal.entries;
    float* state = d.delta + (slot * d.value_heads + head) * dv * dk;
    float* copy =
        static_cast<float*>(d.work) + (static_cast<int64_t>(sequence) * d.value_heads + head) * dv * dk;
    for (int v = threadIdx.x / 32; v < dv; v += kBlock / 32)
        for (int i = threadIdx.x % 32; i < dk; i += 32) {
            float s = fresh ? 0.0f : state[v * dk + i];
            for (int64_t e = first; e < first + committed; ++e)
                s = advance(s, decay_of(d.journal.g[e * d.value_heads + head]),
                            d.journal.u[(e * d.value_heads + head) * dv + v],
                            d.journal.k[(e * d.key_heads + key_head) * dk + i]);
            state[v * dk + i] = s;
            if (journaling) copy[v * dk + i] = s;
        }
}

__global__ void __launch_bounds__(kBlock) recur(DeltaStep d, int channels) {
    __shared__ float q[kMaxDim], k[kMaxDim], partial[kBlock / 32];
    allow_successor();
    wait_for_predecessor();
    const int head = blockIdx.x, sequence = blockIdx.y, group = d.value_heads / d.key_heads;
    const int begin = d.start[sequence], end = d.start[sequence + 1], dk = d.key_dim, dv = d.value_dim;
    if (begin == end) return;
    const DeltaJournal& j = d.journal;
    const bool has_journal = j.k != nullptr, journaling = has_journal && j.journals(sequence);
    const int64_t slot = d.slots[sequence];
    float* state = journaling ? static_cast<float*>(d.work) +
                                    (static_cast<int64_t>(sequence) * d.value_heads + head) * dv * dk
                              : d.delta + (slot * d.value_heads + head) * dv * dk;
    const bool fresh = d.positions[begin] == 0 && !has_journal;  // else `commit` has made it zero
    for (int r = begin; r < end; ++r) {
        const int64_t at = static_cast<int64_t>(r) * channels, entry = slot * j.entries + r - begin;
        unit(d.x, at + head / group * dk, dk, rsqrtf(static_cast<float>(dk)), q, partial);
        unit(d.x, at + (d.key_heads + head / group) * dk, dk, 1.0f, k, partial);
        const float a = load(d.a, r * d.ab_ld + head) + d.dt_bias[head];
        const float g = d.decay_rate[head] * (a > 20.0f ? a : log1pf(expf(a))), decay = decay_of(g);
        const float beta = 1.0f / (1.0f + expf(-load(d.b, r * d.ab_ld + head)));
        if (journaling && threadIdx.x == 0) j.g[entry * d.value_heads + head] = g;
        if (journaling && head % group == 0)
            for (int i = threadIdx.x; i < dk; i += kBlock)
                j.k[(entry * d.key_heads + head / group) * dk + i] = k[i];
        for (int v = threadIdx.x; v < dv; v += kBlock) {
            float* row = state + static_cast<int64_t>(v) * dk;
            const bool zero = fresh && r == begin;
            float sk = 0, o = 0;
            for (int i = 0; i < dk; ++i) sk += zero ? 0.0f : decay * row[i] * k[i];
            const float delta = beta * (load(d.x, at + 2 * d.key_heads * dk + head * dv + v) - sk);
            for (int i = 0; i < dk; ++i) {
                const float s = advance(zero ? 0.0f : row[i], decay, delta, k[i]);
                row[i] = s;
                o += s * q[i];
            }
            if (journaling) j.u[(entry * d.value_heads + head) * dv + v] = delta;
            static_cast<bf16*>(d.o)[(static_cast<int64_t>(r) * d.value_heads + head) * dv + v] =
                __float2bfloat16(o);
        }
        __syncthreads();
    }
}

}  // namespace

void delta_commit(Context& c, const DeltaStep& d) {
    launch(c, "conv_gated_delta_net: commit", commit, dim3(d.value_heads, d.sequences), kBlock, 0, d);
}

void delta_generic(Context& c, const DeltaStep& d) {
    const int channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim;
    launch(c, "conv_gated_delta_net", convolve, dim3((channels + kBlock - 1) / kBlock, d.sequences), kBlock,
           0, d, channels);
    if (d.journal.k != nullptr) delta_commit(c, d);
    launch(c, "conv_gated_delta_net", recur, dim3(d.value_heads, d.sequences), kBlock, 0, d, channels);
}

}  // namespace quern::cuda::delta
