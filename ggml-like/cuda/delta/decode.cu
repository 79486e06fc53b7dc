// Answer rows: convolution, gates, the delta rule, norm and output gate in one kernel. Steps with more rows than sequences:
// decode_rows.cu.
//
//   block      (sequence, value head); 8 warps, each 16 rows of S [128 v, 128 k]
//   half warp  one row of S at a time, 8 rows in all; a lane has 8 of its 128 floats: 4l .. 4l + 3, and 64 further on
//   S          in registers, two blocks an SM; with many heads decode_stream.cu, with more decode_turns.cu
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
// sequence (2.5 us inside the kernel, 1.0 us of bytes). What comes before the wait is never waited for there: the convolution's window stays raw until it is
// used, else every block would wait for all of S before it asks for its row (H200, 2026-11).
#include "ggml-like/cuda/delta/decode_row.cuh"
#include "ggml-like/cuda/delta/decode_rows.h"
#include "ggml-like/cuda/delta/decode_stream.h"
#include "ggml-like/cuda/delta/decode_turns.h"
#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/delta/shared_outputs.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

/// kSplit blocks share a head's rows of S; more than one: a cluster.
template <int kSplit>
__device__ __forceinline__ void decode(const DeltaStep& d) {
    constexpr int kOwn = kDim / kSplit, kRows = kOwn / kWarps, kPasses = kRows / 2;
    using Target = typename SharedOutputs<kSplit>::Target;
    __shared__ __align__(16) float qk[2 * kDim], v[kDim];
    __shared__ __align__(16) float outputs[2][kDim];  // rows take turns: other blocks may be a row ahead
    __shared__ float squares[kWarps];
    __shared__ SharedOutputs<kSplit> shared_outputs;
    const int sequence = blockIdx.y, head = blockIdx.x / kSplit, share = blockIdx.x % kSplit,
              tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int group = quotient(d.value_heads, d.key_heads), key_head = quotient(head, group);
    const int channels = (2 * d.key_heads + d.value_heads) * kDim;
    allow_successor();
    shared_outputs.begin();

    const int begin = d.start[sequence], end = d.start[sequence + 1];
    const bool active = end > begin;
    const int position = active ? d.positions[begin] : 0;
    int place = position - quotient(position, d.ring) * d.ring;  // of the row in the ring
    const int64_t slot = d.slots[sequence];
    const int half = lane / 16, l = lane % 16, first = share * kOwn + warp * kRows + half;
    float* state = d.delta + ((slot * d.value_heads + head) * kDim + first) * kDim + 4 * l;
    const bool fresh = position == 0;
    const Channels own(d, key_head, head, kOwn, share);
    Channel of_qk, of_v;
    of_qk.early(d, own.qk, slot, position, place, channels);
    if (own.has_output) of_v.early(d, own.v, slot, position, place, channels);
    const float norm = d.norm[own.output];
    const GateWeights gate_weights(d, head);
    const Entries entries(d, sequence, slot, key_head, head);
    StateRows<kPasses> rows;
    rows.load(state, fresh);  // after the windows, which are needed first
    if (active) rows.commit(entries, first, l);
    // Of a cluster's blocks the first row's addresses are made before the wait; a block that has a head to itself has no registers for them.
    constexpr bool kAsksFirst = kSplit > 1;
    RowAt first_row(d, begin, head, own);
    if constexpr (kAsksFirst) first_row.pin_all();
    shared_outputs.wait_for_all_blocks();
    wait_for_predecessor();
    if (!active) return;
    RowInputs in;
    if constexpr (kAsksFirst) in = RowInputs(first_row);

    // Whether this block writes the key head's entries of k and rings of q and k.
    bool writes_keys = key_head * group == head && share == 0;
    if ((entries.journaling && entries.committed > 0) || end - begin > d.ring - (kTaps - 1))
        writes_keys = last_block(d.counters + sequence * d.key_heads + key_head, group * kSplit);
    if (entries.journaling && (entries.committed > 0 || fresh)) rows.store(state);

#pragma unroll 1
    for (int row = begin; row < end; ++row) {
        const bool stores = row + 1 == end && !entries.journaling;
        const int entry = row - begin;
        shared_outputs.expect(entry, kDim);
        if (!kAsksFirst || entry > 0) in = RowInputs(d, row, head, own);
        const float x = of_qk.next(in.qk);
        qk[tid] = x;
        if (own.has_output) v[own.output] = of_v.next(in.v);
        const Gates gates = gate_weights.gates(in.a, in.b);
        write_square(x, squares);
        __syncthreads();
        const Keys keys(qk, squares, l);
        const Target target(shared_outputs, entry, outputs[entry % 2] + RowSums::own_row(first, lane));

#pragma unroll
        for (int pass = 0; pass < kPasses; pass += kTogether) {
            float4 s[kTogether][2];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) s[j][0] = rows.s[pass + j][0], s[j][1] = rows.s[pass + j][1];
            const RowSums sums(s, keys, gates, v, first + 2 * pass, lane);
            if (RowSums::has_output(lane)) target.send(sums.output, 2 * pass);
            if (entries.journaling && RowSums::has_delta(lane))
                entries.u[entry * entries.u_step + sums.own] = sums.delta_of_own;
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const float delta = sums.delta_of(j, lane);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float4 next = advance4(s[j][h], gates.decay, delta, h == 0 ? keys.k0 : keys.k1);
                    rows.s[pass + j][h] = next;
                    if (stores) *reinterpret_cast<float4*>(state + state_place(pass + j, h)) = next;
                }
            }
        }
        // The convolution's input of this position.
        uint16_t* ring = static_cast<uint16_t*>(d.conv_state) + (slot * d.ring + place) * channels;
        if (writes_keys) ring[own.qk] = in.qk;
        if (own.has_output) ring[own.v] = in.v;
        place = place + 1 == d.ring ? 0 : place + 1;
        if (entries.journaling && writes_keys && !own.is_q)
            entries.k[entry * entries.k_step + own.element] = __fmul_rn(x, keys.rk);
        bf16* y = gated_output(d, row, head, own.output);
        float gate = output_gate(in.z);
        asm volatile("" : "+f"(gate) : "l"(y));  // before the wait
        shared_outputs.wait(entry);  // so all blocks of the head have applied the entries that were here
        if (entries.journaling && share == 0 && tid == 0) entries.g[entry * entries.g_step] = gates.g;
        if (own.has_output) store_gated(d, outputs[entry % 2], own.output, norm, gate, y);
    }
}

__global__ void __launch_bounds__(kBlock, 2) decode_kernel(DeltaStep d) { decode<1>(d); }

CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kBlock, 2) decode_split_kernel(DeltaStep d) { decode<kSplitBlocks>(d); }

}  // namespace

void delta_decode(Context& c, const DeltaStep& d) {
    const int heads = d.value_heads * d.sequences;
    if (d.sequences * d.key_heads > kCounters)
        unsupported("conv_gated_delta_net", "so many answers in a step");
    const bool split = c.capability >= 90 && heads * kSplitBlocks <= c.sms;
    if (d.tokens > d.sequences) return decode_rows(c, d, split);
    if (split)
        return launch(c, "conv_gated_delta_net split", decode_split_kernel,
                      dim3(d.value_heads * kSplitBlocks, d.sequences), kBlock, 0, d);
    if (heads > 2 * c.sms && d.journal.journaling == nullptr) {
        if (heads > kStreamBlocks * c.sms && decode_turns_fits(c)) return decode_turns(c, d);
        if (decode_stream_fits(c)) return decode_stream(c, d);
    }
    launch(c, "conv_gated_delta_net", decode_kernel, dim3(d.value_heads, d.sequences), kBlock, 0, d);
}

}  // namespace quern::cuda::delta
