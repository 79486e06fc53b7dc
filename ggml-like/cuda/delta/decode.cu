// Answer rows: convolution, gates, the delta rule, norm and output gate in one kernel.
//
//   block      (sequence, value head); 8 warps, each 16 rows of S [128 v, 128 k]
//   half warp  one row of S at a time, 8 rows in all; a lane has 8 of its 128 floats: 4l .. 4l + 3, and 64 further on
//   S          in registers, two blocks an SM; or, with many heads, in shared memory (64 KB), three blocks an SM, so that
//              the loads of one run while others compute
//   split      where there are SMs enough, a cluster of four blocks shares a head's rows of S (4 rows a warp), and each
//              sends its outputs to the others, since the norm needs all of a head's
//   channels   each value head of a key head convolves the key head's 256 channels of q and k (L2 hits), a thread each;
//              channels of v are convolved once
//   rows       of a sequence one after another, with the operations of as many steps of one row: the same bits
//
// Journal: S takes in the committed entries first. A sequence that journals writes entries, and writes S
// as it was before them. Entries of k, and the rings of q and k, belong to all blocks of a key head; where a step
// writes what another of these blocks may still have to read, the block that comes last writes.
//
// Shared memory besides: q, k and v of the row, outputs of two rows in turn, sums of squares; less than 3 KB.
//
// Traffic: S read and written once (4.2 MB a sequence and layer of the 35B). S, the convolution's window and the
// journal are loaded before the wait for the predecessor, since only earlier steps wrote them. Bound: latency with one
// sequence (2.5 us inside the kernel, 1.0 us of bytes), bytes with many (64 sequences: 81 us, 64 us of bytes; in
// registers 88). What comes before the wait is never waited for there: the convolution's window stays raw until it is
// used, else every block would wait for all of S before it asks for its row (H200, 2026-11).
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
template <int kSplit, bool kStaged>
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
    const bool fresh = position == 0;
    StateRows<kPasses, kStaged> rows;
    if constexpr (kStaged) {
        extern __shared__ __align__(128) float staged[];
        rows.staged = staged + first * kDim + 4 * l;
        if (active) rows.load(state, false);  // before the position is known; arrive makes the zeros
    }
    // Threads 0..127 have a channel of q, and one of v if the block has its output; the others a channel of k.
    const bool is_q = tid < kDim, has_output = is_q && tid / kOwn == share;
    const int element = tid % kDim, qk_channel = key_head * kDim + (is_q ? 0 : keys) + element;
    const int v_channel = 2 * keys + head * kDim + element;
    Channel of_qk, of_v;
    of_qk.early(d, qk_channel, slot, position, place, channels);
    if (has_output) of_v.early(d, v_channel, slot, position, place, channels);
    const float norm = d.norm[element];
    const Entries entries(d, sequence, slot, key_head, head);
    if constexpr (!kStaged) rows.load(state, fresh);  // after the windows, which are needed first
    if (active) rows.commit(entries, first, l, fresh);
    if constexpr (kSplit > 1) cluster_wait();  // all blocks have begun: their shared memory may be written
    wait_for_predecessor();
    if (!active) return;

    // Whether this block writes the key head's entries of k and rings of q and k.
    bool writes_keys = key_head * group == head && share == 0;
    if ((entries.journaling && entries.committed > 0) || end - begin > d.ring - (kTaps - 1))
        writes_keys = last_block(d.counters + sequence * d.key_heads + key_head, group * kSplit);
    if (entries.journaling && (entries.committed > 0 || fresh)) {
        if (entries.committed == 0) rows.arrive(fresh);
        rows.store(state);
    }

#pragma unroll 1
    for (int row = begin; row < end; ++row) {
        const bool stores = row + 1 == end && !entries.journaling;
        const int entry = row - begin;
        float* o = outputs[entry % 2];
        const uint16_t u_qk = load_row(d.u, row * d.u_ld + qk_channel);
        const uint16_t u_v = has_output ? load_row(d.u, row * d.u_ld + v_channel) : uint16_t{};
        const uint16_t a_bits = load_row(d.a, row * d.ab_ld + head),
                       b_bits = load_row(d.b, row * d.ab_ld + head);
        const float rate = d.decay_rate[head], bias = d.dt_bias[head];
        const uint16_t z_bits = has_output ? load_row(d.z, row * d.z_ld + head * kDim + element) : uint16_t{};
        const float a = as_float(a_bits) + bias, b = as_float(b_bits), z = as_float(z_bits);
        const float x = of_qk.next(u_qk);
        qk[tid] = x;
        if (has_output) v[element] = of_v.next(u_v);
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
        if (row == begin && (!entries.journaling || entries.committed == 0)) rows.arrive(fresh);

#pragma unroll(kStaged ? 1 : kPasses)
        for (int pass = 0; pass < kPasses; pass += kTogether) {
            float sums[2 * kTogether];
            float4 s[kTogether][2];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                s[j][0] = rows.get(pass + j, 0), s[j][1] = rows.get(pass + j, 1);
                sums[j] = dot(s[j][0], k0) + dot(s[j][1], k1);
                sums[kTogether + j] = dot(s[j][0], q0) + dot(s[j][1], q1);
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
                const float delta_of_row = __shfl_sync(0xffffffffu, delta, (lane & 16) + j * kLanes);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float4 next = advance4(s[j][h], decay, delta_of_row, h == 0 ? k0 : k1);
                    if (!kStaged || !stores) rows.put(pass + j, h, next);
                    if (stores) *reinterpret_cast<float4*>(state + rows.place(pass + j, h)) = next;
                }
            }
        }
        // The convolution's input of this position.
        uint16_t* ring = static_cast<uint16_t*>(d.conv_state) + (slot * d.ring + place) * channels;
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

__global__ void __launch_bounds__(kBlock, 2) decode_kernel(DeltaStep d) { decode<1, false>(d); }

constexpr int kStagedBytes = kDim * kDim * 4, kStagedBlocks = 3;  // of an SM
__global__ void __launch_bounds__(kBlock, kStagedBlocks) decode_staged_kernel(DeltaStep d) {
    decode<1, true>(d);
}

constexpr int kSplitBlocks = 4;
CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kBlock, 2) decode_split_kernel(DeltaStep d) {
    decode<kSplitBlocks, false>(d);
}

}  // namespace

void delta_decode(Context& c, const DeltaStep& d) {
    const int heads = d.value_heads * d.sequences;
    if (d.sequences * d.key_heads > kCounters)
        unsupported("conv_gated_delta_net", "so many answers in a step");
    if (c.capability >= 90 && heads * kSplitBlocks <= c.sms)
        return launch(c, "conv_gated_delta_net split", decode_split_kernel,
                      dim3(d.value_heads * kSplitBlocks, d.sequences), kBlock, 0, d);
    const dim3 grid(d.value_heads, d.sequences);
    // Steps of the 35B against registers: 64 sequences 1.7 % faster, 32 0.3 % and 16 2.5 % slower (H200, 2026-11).
    const bool staged = heads > 8 * c.sms && kStagedBlocks * (kStagedBytes + 4096) <= c.shared_bytes;
    if (staged)
        return launch(c, "conv_gated_delta_net staged", decode_staged_kernel, grid, kBlock, kStagedBytes, d);
    launch(c, "conv_gated_delta_net", decode_kernel, grid, kBlock, 0, d);
}

}  // namespace quern::cuda::delta
