// Answer rows: convolution, gates, the delta rule, norm and output gate in one kernel, with S in registers.
//
//   block      (sequence, value head); 8 warps, each 16 rows of S [128 v, 128 k]
//   half warp  one row of S at a time, 8 rows in all; a lane has 8 of its 128 floats: 4l .. 4l + 3, and 64 further on
//   split      where there are SMs enough, a cluster of four blocks shares a head's rows of S (4 rows a warp), and each
//              sends its outputs to the others, since the norm needs all of a head's
//   channels   each value head of a key head convolves the key head's 256 channels of q and k (L2 hits), a thread each;
//              channels of v are convolved once
//   rows       of a sequence one after another, with the operations of as many steps of one row: the same bits
//
// Journal: S takes in the committed entries first, in registers. A sequence that journals writes entries, and writes S
// as it was before them. Entries of k, and the rings of q and k, belong to all blocks of a key head; where a step
// writes what another of these blocks may still have to read, the block that comes last writes.
//
// Shared memory: q, k and v of the row, outputs of two rows in turn, sums of squares; less than 3 KB.
//
// Traffic: S read and written once (4.2 MB a sequence and layer of the 35B). S, the convolution's window and the
// journal are loaded before the wait for the predecessor, since only earlier steps wrote them. Bound: latency with one
// sequence (2.5 us inside the kernel, 1.0 us of bytes), bytes with many (64 sequences: 106 us an op, 64 us of bytes);
// two blocks an SM, so that 8 sequences are under way at once (H200, 2026-11).
#include "ggml-like/cuda/delta/decode_state.cuh"
#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

/// Gives one thread's output to all blocks of the cluster.
template <int kSplit>
__device__ __forceinline__ void share_output(float* to, float value) {
    if constexpr (kSplit == 1) {
        *to = value;
    } else {
#pragma unroll
        for (int rank = 0; rank < kSplit; ++rank) store_to_peer(shared_address(to), rank, value);
    }
}

/// kSplit blocks share a head's rows of S; more than one: a cluster.
template <int kSplit>
__device__ __forceinline__ void decode(const DeltaStep& d) {
    constexpr int kOwn = kDim / kSplit, kRows = kOwn / kWarps, kPasses = kRows / 2;
    constexpr int kTogether = 2, kLanes = 8 / kTogether;  // rows of a half warp whose sums are made at once
    __shared__ __align__(16) float qk[2 * kDim], v[kDim];
    __shared__ __align__(16) float outputs[2][kDim];  // rows take turns: other blocks may be a row ahead
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
    // Threads 0..127 have a channel of q, and one of v if the block has its output; the others a channel of k.
    const bool is_q = tid < kDim, has_output = is_q && tid / kOwn == share;
    const int element = tid % kDim, qk_channel = key_head * kDim + (is_q ? 0 : keys) + element;
    const int v_channel = 2 * keys + head * kDim + element;
    Channel of_qk, of_v;
    of_qk.early(d, qk_channel, slot, position, place, channels);
    if (has_output) of_v.early(d, v_channel, slot, position, place, channels);
    const float rate = d.decay_rate[head], bias = d.dt_bias[head], norm = d.norm[element];
    const Entries entries(d, sequence, slot, key_head, head);
    StateRows<kPasses> rows;  // loaded after the windows, which are needed first
    rows.load(state, position == 0);
    rows.commit(entries, first, l);
    if constexpr (kSplit > 1) cluster_wait();  // all blocks have begun: their shared memory may be written
    wait_for_predecessor();
    if (!active) return;

    // Whether this block writes the key head's entries of k and rings of q and k.
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
            // kLanes lanes have the same sum: lanes below 8 s.k of a row, of which they make delta, the others s.q, of
            // which they make the output.
            const float sum = lane_sums<16>(sums);
            const int own = first + 2 * (pass + l / kLanes % kTogether);
            const float delta_of_own = __fmul_rn(beta, fmaf(-decay, sum, v[own]));
            const float delta = __shfl_sync(0xffffffffu, delta_of_own, lane & ~8);
            if (l >= 8 && l % kLanes == 0)
                share_output<kSplit>(
                    &o[own], __bfloat162float(__float2bfloat16(fmaf(decay, sum, __fmul_rn(product, delta)))));
            if (entries.journaling && l < 8 && l % kLanes == 0)
                entries.u[entry * entries.u_step + own] = delta_of_own;
            // before the stores of S, which the cluster need not wait for
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
        // The convolution's input of this position.
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
