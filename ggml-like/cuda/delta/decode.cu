// Answer rows: convolution, gates, the delta rule, norm and gate in one kernel, the state in registers.
//
//   block = (sequence, value head); 8 warps, a half warp a row of S, 8 floats of it a lane, 8 rows; where
//   there are multiprocessors enough, four blocks a head, which give each other their outputs for the norm
//   the 256 q and k channels are convolved by every value head of a key head (L2 hits); v channels once
//   rows of a sequence one after another, as they would come one a step: the same operations, the same bits
//
// Journal: S takes in the committed entries in registers first. Rows that journal write entries, and S as it
// was before them. Entries of k and the rings of q and k belong to all blocks of a key head: where the step
// writes what such a block may still have to read, the block that comes last writes.
//
// Traffic: S read and written once (4.2 MB a sequence of the 35B's layer). Limit: latency; S, the
// convolution's window and the journal are loaded before the wait for the predecessor, because only the
// previous step wrote them. Two blocks a multiprocessor: 8 sequences are under way at once.
#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/delta/rule.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

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
    /// SiLU of the sum, rounded as it would be in memory; then `now` belongs to the window.
    __device__ __forceinline__ float next(float now) {
        const float sum =
            fmaf(taps.w, now, fmaf(taps.z, past[2], fmaf(taps.y, past[1], __fmul_rn(taps.x, past[0]))));
        past[0] = past[1], past[1] = past[2], past[2] = now;
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
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, __fmul_rn(a.x, b.x))));
}
__device__ __forceinline__ float4 advance4(const float4& s, float decay, float u, const float4& k) {
    return {advance(s.x, decay, u, k.x), advance(s.y, decay, u, k.y), advance(s.z, decay, u, k.z),
            advance(s.w, decay, u, k.w)};
}

__device__ __forceinline__ float4 load4(const float* shared, int at) {
    return *reinterpret_cast<const float4*>(shared + at);
}
__device__ __forceinline__ float4 scaled4(const float* shared, int at, float by) {
    const float4 x = load4(shared, at);
    return {__fmul_rn(x.x, by), __fmul_rn(x.y, by), __fmul_rn(x.z, by), __fmul_rn(x.w, by)};
}

/// The journal of one sequence's value head.
struct Entries {
    float *k, *u, *g;  // of entry 0
    int k_step, u_step, g_step;
    int committed;
    bool journaling;

    __device__ __forceinline__ Entries(const DeltaStep& d, int sequence, int64_t slot, int key_head, int head)
        : k_step(d.key_heads * kDim), u_step(d.value_heads * kDim), g_step(d.value_heads) {
        const DeltaJournal& j = d.journal;
        const bool any = j.k != nullptr;
        const int64_t first = slot * j.entries;
        committed = any ? j.committed[sequence] : 0;
        journaling = any && j.journaling[sequence] != 0;
        k = j.k + first * k_step + key_head * kDim;
        u = j.u + first * u_step + head * kDim;
        g = j.g + first * g_step + head;
    }
};

/// The lane's part of `kPasses` rows of S, two rows apart.
template <int kPasses>
struct StateRows {
    float4 s[kPasses][2];

    __device__ __forceinline__ void load(const float* from, bool zero) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                s[i][h] = zero ? float4{} : *reinterpret_cast<const float4*>(from + 2 * i * kDim + 64 * h);
    }
    __device__ __forceinline__ void store(float* to, int i) const {
        *reinterpret_cast<float4*>(to + 2 * i * kDim) = s[i][0];
        *reinterpret_cast<float4*>(to + 2 * i * kDim + 64) = s[i][1];
    }
    __device__ __forceinline__ void commit(const Entries& entries, int first, int l) {
#pragma unroll 1
        for (int e = 0; e < entries.committed; ++e) {
            const float* k = entries.k + e * entries.k_step;
            const float* u = entries.u + e * entries.u_step + first;
            const float decay = decay_of(entries.g[e * entries.g_step]);
            const float4 k0 = load4(k, 4 * l), k1 = load4(k, 64 + 4 * l);
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                s[i][0] = advance4(s[i][0], decay, u[2 * i], k0);
                s[i][1] = advance4(s[i][1], decay, u[2 * i], k1);
            }
        }
    }
};

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
    __shared__ __align__(16) float qk[2 * kDim], v[kDim];
    __shared__ __align__(16) float outputs[2][kDim];  // of rows in turn: peers may be a row ahead
    __shared__ float squares[kWarps];
    const int sequence = blockIdx.y, head = blockIdx.x / kSplit, share = blockIdx.x % kSplit,
              tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int group = quotient(d.value_heads, d.key_heads), key_head = quotient(head, group);
    const int keys = d.key_heads * kDim, channels = 2 * keys + d.value_heads * kDim;
    allow_successor();
    if constexpr (kSplit > 1) cluster_arrive();

    const int begin = d.start[sequence], end = d.start[sequence + 1];
    const bool active = end > begin;
    const int position = active ? d.positions[begin] : 0;
    int place = position - quotient(position, d.ring) * d.ring;  // of the row in the ring
    const int64_t slot = d.slots[sequence];
    const int half = lane / 16, l = lane % 16, first = share * kOwn + warp * kRows + half;
    float* state = d.delta + ((slot * d.value_heads + head) * kDim + first) * kDim + 4 * l;
    // Threads 0..127: a channel of q, those with an output of this block one of v; the others: a channel of
    // k.
    const bool is_q = tid < kDim, has_output = is_q && tid / kOwn == share;
    const int element = tid % kDim, qk_channel = key_head * kDim + (is_q ? 0 : keys) + element;
    const int v_channel = 2 * keys + head * kDim + element;
    Channel of_qk, of_v;
    of_qk.early(d, qk_channel, slot, position, place, channels);
    if (has_output) of_v.early(d, v_channel, slot, position, place, channels);
    const float rate = d.decay_rate[head], bias = d.dt_bias[head], norm = d.norm[element];
    const Entries entries(d, sequence, slot, key_head, head);
    StateRows<kPasses> rows;  // after the windows, which are waited for first
    rows.load(state, position == 0);
    rows.commit(entries, first, l);
    if constexpr (kSplit > 1) cluster_wait();  // all of it have begun
    wait_for_predecessor();
    if (!active) return;

    // Which block writes the key head's entries of k and rings of q and k.
    bool writes_keys = key_head * group == head && share == 0;
    if ((entries.journaling && entries.committed > 0) || end - begin > d.ring - (kTaps - 1))
        writes_keys = last_block(d.counters + sequence * d.key_heads + key_head, group * kSplit);
    if (entries.journaling && (entries.committed > 0 || position == 0))
#pragma unroll
        for (int i = 0; i < kPasses; ++i) rows.store(state, i);

#pragma unroll 1
    for (int row = begin; row < end; ++row) {
        const bool stores = row + 1 == end && !entries.journaling;
        const int entry = row - begin;
        float* o = outputs[entry % 2];
        const bf16* u = static_cast<const bf16*>(d.u) + row * d.u_ld;
        const bf16 u_qk = load_row(u + qk_channel), u_v = has_output ? load_row(u + v_channel) : bf16{};
        const float a =
            __bfloat162float(load_row(static_cast<const bf16*>(d.a) + row * d.ab_ld + head)) + bias;
        const float b = __bfloat162float(load_row(static_cast<const bf16*>(d.b) + row * d.ab_ld + head));
        const float z = has_output ? __bfloat162float(load_row(static_cast<const bf16*>(d.z) + row * d.z_ld +
                                                               head * kDim + element))
                                   : 0.0f;
        const float x = of_qk.next(__bfloat162float(u_qk));
        qk[tid] = x;
        if (has_output) v[element] = of_v.next(__bfloat162float(u_v));
        const float softplus = a > 20.0f ? a : log1pf(__expf(a));
        const float g = __fmul_rn(rate, softplus), decay = decay_of(g), beta = 1.0f / (1.0f + __expf(-b));
        const float square = warp_sum(__fmul_rn(x, x));
        if (lane == 0) squares[warp] = square;
        __syncthreads();
        const auto four = [](const float* p) { return (p[0] + p[1]) + (p[2] + p[3]); };
        const float rq = rsqrtf(four(squares) + 1e-6f) * rsqrtf(static_cast<float>(kDim));
        const float rk = rsqrtf(four(squares + 4) + 1e-6f);
        const float4 q0 = scaled4(qk, 4 * l, rq), q1 = scaled4(qk, 64 + 4 * l, rq);
        const float4 k0 = scaled4(qk, kDim + 4 * l, rk), k1 = scaled4(qk, kDim + 64 + 4 * l, rk);
        const float product = half_warp_sum(dot(q0, k0) + dot(q1, k1));

#pragma unroll
        for (int pass = 0; pass < kPasses; pass += kTogether) {
            float sums[2 * kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const float4(&s)[2] = rows.s[pass + j];
                sums[j] = dot(s[0], k0) + dot(s[1], k1);
                sums[kTogether + j] = dot(s[0], q0) + dot(s[1], q1);
            }
            // Of kLanes lanes each: those below 8 have s k of a pass and make its delta, the others s q and
            // its output.
            const float sum = lane_sums<16>(sums);
            const int own = first + 2 * (pass + l / kLanes % kTogether);
            const float delta_of_own = __fmul_rn(beta, fmaf(-decay, sum, v[own]));
            const float delta = __shfl_sync(0xffffffffu, delta_of_own, lane & ~8);
            if (l >= 8 && l % kLanes == 0)
                share_output<kSplit>(
                    &o[own], __bfloat162float(__float2bfloat16(fmaf(decay, sum, __fmul_rn(product, delta)))));
            if (entries.journaling && l < 8 && l % kLanes == 0)
                entries.u[entry * entries.u_step + own] = delta_of_own;
            // before the stores that nobody of the cluster waits for
            if (kSplit > 1 && pass + kTogether == kPasses) cluster_arrive();
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const int i = pass + j;
                const float delta_of_row = __shfl_sync(0xffffffffu, delta, (lane & 16) + j * kLanes);
                rows.s[i][0] = advance4(rows.s[i][0], decay, delta_of_row, k0);
                rows.s[i][1] = advance4(rows.s[i][1], decay, delta_of_row, k1);
                if (stores) rows.store(state, i);
            }
        }
        // The ring's row of this position.
        bf16* ring = static_cast<bf16*>(d.conv_state) + (slot * d.ring + place) * channels;
        if (writes_keys) ring[qk_channel] = u_qk;
        if (has_output) ring[v_channel] = u_v;
        place = place + 1 == d.ring ? 0 : place + 1;
        if (entries.journaling) {
            if (writes_keys && !is_q) entries.k[entry * entries.k_step + element] = __fmul_rn(x, rk);
            if (share == 0 && tid == 0) entries.g[entry * entries.g_step] = g;
        }
        if constexpr (kSplit > 1)
            cluster_wait();
        else
            __syncthreads();
        if (has_output) {
            const float4 mine = load4(o, 4 * lane);
            const float r = rsqrtf(warp_sum(dot(mine, mine)) / static_cast<float>(kDim) + d.eps);
            const int64_t at = (static_cast<int64_t>(row) * d.value_heads + head) * kDim + element;
            static_cast<bf16*>(d.y)[at] = __float2bfloat16(o[element] * r * norm * (z / (1.0f + __expf(-z))));
        }
    }
}

__global__ void __launch_bounds__(kBlock, 2) decode_kernel(DeltaStep d) { decode<1>(d); }

constexpr int kSplitBlocks = 4;
CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kBlock, 2) decode_split_kernel(DeltaStep d) { decode<kSplitBlocks>(d); }

}  // namespace

void delta_decode(Context& c, const DeltaStep& d) {
    const int heads = d.value_heads * d.sequences;
    if (d.sequences * d.key_heads > kCounters)
        unsupported("conv_gated_delta_net", "so many answers in a step");
    if (c.capability >= 90 && heads * kSplitBlocks <= c.sms)
        return launch(c, "conv_gated_delta_net", decode_split_kernel,
                      dim3(d.value_heads * kSplitBlocks, d.sequences), kBlock, 0, d);
    launch(c, "conv_gated_delta_net", decode_kernel, dim3(d.value_heads, d.sequences), kBlock, 0, d);
}

}  // namespace quern::cuda::delta
