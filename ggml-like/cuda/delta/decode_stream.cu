// Answer rows of many sequences, none of which goes to the journal: convolution, gates, the delta rule, norm and output gate in one
// kernel. With more heads than blocks that run at once decode_turns.cu.
//
//   block  (sequence, value head); 8 warps, each 16 rows of S [128 v, 128 k]
//   S      passes through shared memory in four pieces, three of them on their way, so that four blocks fit an SM: the
//          loads of some run while others compute or store. Every lane copies what it reads itself.
//   rows   of a sequence one after another, each with all of S again; the first one's S is what the journal's committed entries
//          make of it
//
// Shared memory: 48 KB of S; q, k, v and outputs of the row, sums of squares: 2.2 KB.
//
// Traffic: S read and written once a row (4.2 MB a sequence and layer of the 35B); written so that it leaves the L2 cache first,
// since nobody reads it before the next step. The pieces of the first blocks are asked for
// before the wait for the predecessor, and so are committed entries, after which S is read and written once more. Bound: bytes.
#include "ggml-like/cuda/delta/decode_stream.h"

#include "ggml-like/cuda/delta/decode_row.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kRows = kDim / kWarps, kPieces = kRows / (2 * kTogether), kAhead = kPieces - 1;
constexpr int kPieceFloats = 2 * kTogether * kDim;  // of a warp
constexpr int kStateBytes = kAhead * kPieceFloats * kWarps * 4;

/// Windows of a thread's two channels while S passes through its registers; read where a sequence has another row.
struct Windows {
    uint16_t past[2][kTaps - 1][kBlock];

    __device__ __forceinline__ void keep(int which, const Channel& c) {
#pragma unroll
        for (int j = 0; j < kTaps - 1; ++j) past[which][j][threadIdx.x] = c.past[j];
    }
    __device__ __forceinline__ void read(int which, const DeltaStep& d, int channel, Channel& c) const {
        c.taps = *reinterpret_cast<const float4*>(d.conv + channel * kTaps);
#pragma unroll
        for (int j = 0; j < kTaps - 1; ++j) c.past[j] = past[which][j][threadIdx.x];
    }
};

/// A lane's parts of S on their way.
struct Stream {
    float* staged;  // of piece 0
    const float* state;

    __device__ __forceinline__ static float* at(float* from, int slot, int j, int h) {
        return from + slot * kPieceFloats + state_place(j, h);
    }
    /// A group of copies; past the last piece an empty one.
    __device__ __forceinline__ void ask(int piece) const {
        if (piece < kPieces) {
#pragma unroll
            for (int j = 0; j < kTogether; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    copy_async16(at(staged, piece % kAhead, j, h),
                                 state + state_place(piece * kTogether + j, h));
        }
        commit_copies();
    }
    __device__ __forceinline__ void begin() const {
#pragma unroll
        for (int piece = 0; piece < kAhead; ++piece) ask(piece);
    }
    /// zero: S is zeros, whatever lies there.
    __device__ __forceinline__ void take(int piece, bool zero, float4 (&s)[kTogether][2]) const {
        wait_copies<kAhead - 1>();
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                s[j][h] = zero ? float4{} : load4(at(staged, piece % kAhead, j, h), 0);
    }
};

__global__ void __launch_bounds__(kBlock, kStreamBlocks) decode_stream_kernel(DeltaStep d) {
    extern __shared__ __align__(128) float staged[];
    __shared__ __align__(16) float qk[2 * kDim], v[kDim], o[kDim];
    __shared__ float squares[kWarps];
    __shared__ Windows windows;
    const int sequence = blockIdx.y, head = blockIdx.x, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int group = quotient(d.value_heads, d.key_heads), key_head = quotient(head, group);
    const int channels = (2 * d.key_heads + d.value_heads) * kDim;
    allow_successor();

    const int begin = d.start[sequence], end = d.start[sequence + 1];
    const bool active = end > begin;
    const int64_t slot = d.slots[sequence];
    const int l = lane % 16, first = warp * kRows + lane / 16;
    float* state = d.delta + ((slot * d.value_heads + head) * kDim + first) * kDim + 4 * l;
    const Stream stream{staged + warp * kAhead * kPieceFloats + lane / 16 * kDim + 4 * l, state};
    const Entries entries(d, sequence, slot, key_head, head);
    if (active && entries.committed > 0) commit_in_memory<kRows / 2>(entries, state, first, l);
    if (active) stream.begin();
    const int position = active ? d.positions[begin] : 0;
    const int place = position - quotient(position, d.ring) * d.ring;  // of the row in the ring
    const Channels own(d, key_head, head, kDim, 0);
    Channel of_qk, of_v;
    of_qk.early(d, own.qk, slot, position, place, channels);
    if (own.has_output) of_v.early(d, own.v, slot, position, place, channels);
    const GateWeights gate_weights(d, head);
    wait_for_predecessor();
    if (!active) return;
    // Rows that overwrite what another block of the key head may still have to read are written by its last block.
    bool writes_keys = key_head * group == head;
    if (end - begin > d.ring - (kTaps - 1))
        writes_keys = last_block(d.counters + sequence * d.key_heads + key_head, group);

    const auto decode_row = [&](int row, bool zero, Channel& of_qk, Channel& of_v) {
        const RowInputs in(d, row, head, own);
        const float x = of_qk.next(in.qk);
        qk[tid] = x;
        windows.keep(0, of_qk);
        if (own.has_output) {
            v[own.output] = of_v.next(in.v);
            windows.keep(1, of_v);
        }
        const Gates gates = gate_weights.gates(in.a, in.b);
        write_square(x, squares);
        __syncthreads();
        const Keys keys(qk, squares, l);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            float4 s[kTogether][2];
            stream.take(piece, zero, s);
            const RowSums sums(s, keys, gates, v, first + 2 * piece * kTogether, lane);
            stream.ask(piece + kAhead);  // into the place of the piece just read
            if (sums.has_output(lane)) o[sums.own] = sums.output;
            store_advanced(state + state_place(piece * kTogether, 0), s, sums, keys, gates, lane);
        }
        // The convolution's input of this position.
        const int position = d.positions[row], place = position - quotient(position, d.ring) * d.ring;
        uint16_t* ring = static_cast<uint16_t*>(d.conv_state) + (slot * d.ring + place) * channels;
        if (writes_keys) ring[own.qk] = in.qk;
        if (own.has_output) ring[own.v] = in.v;
        __syncthreads();
        if (own.has_output)
            store_gated(d, o, own.output, d.norm[own.output], output_gate(in.z),
                        gated_output(d, row, head, own.output));
    };
    decode_row(begin, position == 0, of_qk, of_v);
#pragma unroll 1
    for (int row = begin + 1; row < end; ++row) {  // of few steps: not worth registers of the one above
        wait_copies<0>();
        __threadfence();
        stream.begin();
        windows.read(0, d, own.qk, of_qk);
        if (own.has_output) windows.read(1, d, own.v, of_v);
        __syncthreads();  // o has been read
        decode_row(row, false, of_qk, of_v);
    }
}

}  // namespace

bool decode_stream_fits(const Context& c) { return kStreamBlocks * (kStateBytes + 4096) <= c.shared_bytes; }

void decode_stream(Context& c, const DeltaStep& d) {
    launch(c, "conv_gated_delta_net stream", decode_stream_kernel, dim3(d.value_heads, d.sequences), kBlock,
           kStateBytes, d);
}

}  // namespace quern::cuda::delta
