// Answer rows of many sequences, none of which goes to the journal: convolution, gates, the delta rule, norm and output gate in one
// kernel.
//
//   block  one value head of several sequences, one after another; 8 warps, each 16 rows of S [128 v, 128 k]
//   S      in four pieces a sequence, which pass through a ring of six places: the next sequence's are on their way while one is
//          computed. Every lane copies what it reads itself, so no lane waits for another.
//   rows   of a sequence one after another; for later ones each lane reads what it has stored
//
// Shared memory: the ring 96 KB; q, k, v and outputs of the row, sums of squares, the list of sequences 4 KB.
//
// Traffic: S read and written once (4.2 MB a sequence and layer of the 35B), and once more for each later row; written so that it
// leaves the L2 cache first, since nobody reads it before the next step. Of S only the first pieces are asked for before the wait for
// the predecessor: more would delay what that still reads. Committed entries are applied then, too, after which S is read and written
// once more. What a sequence's first row needs is asked for while the sequence before it is computed: what is asked for behind S
// comes behind S. Bound: bytes, 3.7 TB/s; a kernel that only reads and writes as much in place gets 3.8 (32 sequences, H200, 2026-11).
#include "ggml-like/cuda/delta/decode_turns.h"

#include <algorithm>

#include "ggml-like/cuda/delta/decode_row.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kBlocks = 2;  // of an SM
constexpr int kRows = kDim / kWarps, kPieces = kRows / (2 * kTogether);
constexpr int kPlaces = 6;                          // of the ring
constexpr int kPieceFloats = 2 * kTogether * kDim;  // of a warp
constexpr int kRingBytes = kPlaces * kPieceFloats * kWarps * 4;
constexpr int kMaxAnswers = 64;         // of a block
constexpr int kStaticBytes = 6 * 1024;  // at most, with what every block takes

/// A sequence that has rows.
struct Answer {
    int sequence, begin, end, slot;
    int committed;  // entries of the journal
    int position;   // of its first row; after find_positions
};
/// Those of the block, gridDim.y apart.
struct Answers {
    Answer of[kMaxAnswers];
    int count;

    /// One warp.
    __device__ __forceinline__ void list(const DeltaStep& d) {
        const int lane = threadIdx.x;
        const bool journal = d.journal.k != nullptr;
        int listed = 0;
        for (int from = blockIdx.y; from < d.sequences; from += 32 * static_cast<int>(gridDim.y)) {
            const int s = from + lane * static_cast<int>(gridDim.y);
            Answer a{};
            if (s < d.sequences)
                a = {s, d.start[s], d.start[s + 1], d.slots[s], journal ? d.journal.committed[s] : 0};
            const bool any = a.begin < a.end;
            const unsigned with_rows = __ballot_sync(0xffffffffu, any);
            if (any) of[listed + __popc(with_rows & ((1u << lane) - 1))] = a;
            listed += __popc(with_rows);
        }
        if (lane == 0) count = listed;
    }
    /// As many threads as a list has room for. By itself, since S is not asked for before the list is there.
    __device__ __forceinline__ void find_positions(const DeltaStep& d) {
        static_assert(kMaxAnswers <= kBlock);
        const int i = static_cast<int>(threadIdx.x);
        if (i < count) of[i].position = d.positions[of[i].begin];
    }
};

/// A lane's parts of S of the block's sequences, one after another.
struct Stream {
    float* ring;
    float* heads;  // of slot 0
    int64_t slot_floats;
    int asked = 0;           // pieces, of all sequences
    int asking = 0, at = 0;  // places of the next piece that is asked for, and of the next one that is read

    __device__ __forceinline__ float* state(const Answer& answer) const {
        return heads + answer.slot * slot_floats;
    }
    /// A group of copies; past the last piece an empty one.
    __device__ __forceinline__ void ask(const Answers& answers) {
        if (const int answer = asked / kPieces; answer < answers.count) {
            const float* from = state(answers.of[answer]) + asked % kPieces * kPieceFloats;
            float* to = ring + asking * kPieceFloats;
#pragma unroll
            for (int j = 0; j < kTogether; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) copy_async16(to + state_place(j, h), from + state_place(j, h));
        }
        commit_copies();
        ++asked;
        asking = next(asking);
    }
    /// The oldest piece that was asked for; its place is free once it has been read.
    __device__ __forceinline__ const float* take() {
        wait_copies<kPlaces - 1>();
        const float* piece = ring + at * kPieceFloats;
        at = next(at);
        return piece;
    }

  private:
    __device__ __forceinline__ static int next(int place) { return place + 1 == kPlaces ? 0 : place + 1; }
};

__device__ __forceinline__ void read_piece(const float* from, float4 (&s)[kTogether][2]) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) s[j][h] = load4(from, state_place(j, h));
}

__global__ void __launch_bounds__(kBlock, kBlocks) decode_turns_kernel(DeltaStep d) {
    extern __shared__ __align__(128) float ring[];
    __shared__ __align__(16) float qk[2 * kDim], v[kDim], o[kDim];
    __shared__ float squares[kWarps];
    __shared__ __align__(16) Answers answers;
    const int head = blockIdx.x, tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int l = lane % 16, first = warp * kRows + lane / 16;
    const int group = quotient(d.value_heads, d.key_heads), key_head = quotient(head, group);
    const int channels = (2 * d.key_heads + d.value_heads) * kDim;
    allow_successor();
    if (warp == 0) answers.list(d);
    __syncthreads();

    Stream stream{ring + warp * kPlaces * kPieceFloats + lane / 16 * kDim + 4 * l,
                  d.delta + (head * kDim + first) * kDim + 4 * l, int64_t{d.value_heads} * kDim * kDim};
    for (int i = 0; i < answers.count; ++i) {
        const Answer& a = answers.of[i];
        if (a.committed == 0) continue;
        commit_in_memory<kRows / 2>(Entries(d, a.sequence, a.slot, key_head, head), stream.state(a), first,
                                    tid % 16);
    }
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) stream.ask(answers);
    answers.find_positions(d);
    __syncthreads();
    const Channels own(d, key_head, head, kDim, 0);
    Channel of_qk, of_v;
    const auto ask_windows = [&](const Answer& a) {
        const int place = a.position - quotient(a.position, d.ring) * d.ring;
        of_qk.early(d, own.qk, a.slot, a.position, place, channels);
        if (own.has_output) of_v.early(d, own.v, a.slot, a.position, place, channels);
    };
    if (answers.count > 0) ask_windows(answers.of[0]);
    const GateWeights gate_weights(d, head);
    const float norm = d.norm[own.output];
    wait_for_predecessor();
    if (answers.count == 0) return;
    RowInputs in(d, answers.of[0].begin, head, own);
#pragma unroll 1
    for (int i = 0; i < answers.count; ++i) {
        const Answer now = answers.of[i];
        // Rows that overwrite what another block of the key head may still have to read are written by its last block.
        bool writes_keys = key_head * group == head;
        if (now.end - now.begin > d.ring - (kTaps - 1))
            writes_keys = last_block(d.counters + now.sequence * d.key_heads + key_head, group);
        int place = now.position - quotient(now.position, d.ring) * d.ring;
        float* state = stream.state(now);
#pragma unroll 1
        for (int row = now.begin; row < now.end; ++row) {
            const bool is_first = row == now.begin;
            if (!is_first) in = RowInputs(d, row, head, own);
            const float x = of_qk.next(in.qk);
            qk[tid] = x;
            if (own.has_output) v[own.output] = of_v.next(in.v);
            // The convolution's input of this position.
            uint16_t* inputs =
                static_cast<uint16_t*>(d.conv_state) + (int64_t{now.slot} * d.ring + place) * channels;
            if (writes_keys) inputs[own.qk] = in.qk;
            if (own.has_output) inputs[own.v] = in.v;
            place = place + 1 == d.ring ? 0 : place + 1;
            const Gates gates = gate_weights.gates(in.a, in.b);
            const uint16_t z = in.z;
            write_square(x, squares);
            __syncthreads();
            if (row + 1 == now.end && i + 1 < answers.count) {
                in = RowInputs(d, answers.of[i + 1].begin, head, own);
                ask_windows(answers.of[i + 1]);
            }
            const Keys keys(qk, squares, l);
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                float4 s[kTogether][2];
                if (is_first)
                    read_piece(stream.take(), s);
                else
                    read_piece(state + piece * kPieceFloats, s);  // which this lane has stored
                if (is_first && now.position == 0) {
#pragma unroll
                    for (int j = 0; j < kTogether; ++j) s[j][0] = s[j][1] = float4{};
                }
                const RowSums sums(s, keys, gates, v, first + 2 * piece * kTogether, lane);
                if (is_first) stream.ask(answers);  // into the place of the piece just read
                if (sums.has_output(lane)) o[sums.own] = sums.output;
                store_advanced(state + piece * kPieceFloats, s, sums, keys, gates, lane);
            }
            __syncthreads();
            if (own.has_output)
                store_gated(d, o, own.output, norm, output_gate(z), gated_output(d, row, head, own.output));
        }
    }
}

}  // namespace

bool decode_turns_fits(const Context& c) { return kBlocks * (kRingBytes + kStaticBytes) <= c.shared_bytes; }

void decode_turns(Context& c, const DeltaStep& d) {
    // A block keeps its value head.
    const int fewest = (d.sequences + kMaxAnswers - 1) / kMaxAnswers;
    const int blocks = std::clamp(kBlocks * c.sms / d.value_heads, fewest, d.sequences);
    launch(c, "conv_gated_delta_net turns", decode_turns_kernel, dim3(d.value_heads, blocks), kBlock,
           kRingBytes, d);
}

}  // namespace quern::cuda::delta
