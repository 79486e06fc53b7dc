// Answer steps that verify drafts, several rows of a sequence: the work of decode.cu, in batches of rows.
//
//   block, cluster   as in decode.cu: (sequence, value head), or a cluster of four blocks that share a head's rows of S
//   batch            up to 8 rows (4 where a block has a whole head); the block meets three times in it, not twice a row
//
//     convolution, gates   all rows' inputs are loaded at once; q and k: a thread a channel goes from row to row; v: a thread an
//                          output of a row
//     delta rule           a half warp has its rows of S in registers and takes row after row without waiting for others
//     norm, output gate    outputs of all rows, a warp 32 of them
//
//   A row's operations are those of decode.cu (decode_row.cuh) in the same order: the same bits.
//
// Journal: as in decode.cu. All entries are asked for with S, before it is known how many of them are committed.
//
// Shared memory: inputs and outputs of a batch, and entries: 41 KB, of blocks that have a whole head 32.
//
// Traffic: as of decode.cu, and entries. Bound: latency of a row's sums over S, which the next row needs; one load from L2 a
// batch. Some clusters get an SM only when the predecessor is about to end; for them little is early.
#include "ggml-like/cuda/delta/decode_row.cuh"
#include "ggml-like/cuda/delta/decode_rows.h"
#include "ggml-like/cuda/delta/shared_outputs.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

/// Rows of a batch: registers of S leave few where a block has all of a head's.
template <int kSplit>
constexpr int kBatchOf = kSplit > 1 ? 8 : 4;

template <int kBatch>
struct BatchMemory {
    __align__(16) float qk[kBatch][2 * kDim];
    __align__(16) float v[kBatch][kDim];
    __align__(16) float outputs[2][kBatch][kDim];  // batches take turns: other blocks may be a batch ahead
    float deltas[kBatch][kDim];
    float squares[kBatch][kWarps], products[kBatch];  // of q and k
    Gates gates[kBatch];
    uint16_t inputs[kBatch][2 * kDim], v_inputs[kBatch][kDim];  // of the convolution, BF16
    bool writes_keys;
};

/// Entries of the journal on their way to shared memory: k of the key head, u of the block's rows of S, g.
template <int kOwn>
struct EntryCopies {
    struct Memory {
        __align__(16) float k[DeltaJournal::kMaxEntries][kDim];
        __align__(16) float u[DeltaJournal::kMaxEntries][kOwn];
        float g[DeltaJournal::kMaxEntries];
    };
    Memory& memory;
    const Entries& entries;
    int share;

    /// Asks for `count` of them.
    __device__ __forceinline__ void ask(int count) const {
        constexpr int kPieces = kDim / 4, kOwnPieces = kOwn / 4, kAll = kPieces + kOwnPieces;
#pragma unroll 1
        for (int at = static_cast<int>(threadIdx.x); at < count * kAll; at += kBlock) {
            const int e = at / kAll, piece = at % kAll, own = 4 * (piece - kPieces);
            if (piece < kPieces)
                copy_async16(memory.k[e] + 4 * piece, entries.k + e * entries.k_step + 4 * piece);
            else
                copy_async16(memory.u[e] + own, entries.u + e * entries.u_step + share * kOwn + own);
        }
        if (const int e = static_cast<int>(threadIdx.x); e < count)
            copy_async4(memory.g + e, entries.g + e * entries.g_step);
        commit_copies();
    }
};

/// The whole block: applies the first `count` entries in order. first: the lane's row of S among the block's.
template <int kOwn, int kPasses>
__device__ __forceinline__ void commit(StateRows<kPasses>& rows,
                                       const typename EntryCopies<kOwn>::Memory& entries, int count,
                                       int first, int l) {
    wait_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int e = 0; e < count; ++e) {
        const float decay = decay_of(entries.g[e]);
        const float4 k[2] = {load4(entries.k[e], 4 * l), load4(entries.k[e], 64 + 4 * l)};
#pragma unroll
        for (int i = 0; i < kPasses; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                rows.s[i][h] = advance4(rows.s[i][h], decay, entries.u[e][first + 2 * i], k[h]);
    }
}

/// a / b with the bits of the division operator, where no exponent is extreme; no branch, so that several run side by side.
__device__ __forceinline__ float divided(float a, float b) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    r = fmaf(r, fmaf(-b, r, 1.0f), r);
    const float q = __fmul_rn(a, r);
    return fmaf(r, fmaf(-b, q, a), q);
}
/// SiLU of sums over windows, rounded to BF16: Channel::next's.
template <int kN>
__device__ __forceinline__ void activate(float (&x)[kN]) {
    bool moderate = true;
#pragma unroll
    for (const float v : x) moderate &= fabsf(v) < 60.0f && fabsf(v) > 1e-25f;
    if (moderate) {
#pragma unroll
        for (float& v : x) v = divided(v, 1.0f + __expf(-v));
    } else {
#pragma unroll 1
        for (int i = 0; i < kN; ++i)
#pragma unroll
            for (int j = 0; j < kN; ++j)  // constant indices keep x in registers
                if (i == j) x[j] = x[j] / (1.0f + __expf(-x[j]));
    }
#pragma unroll
    for (float& v : x) v = __bfloat162float(__float2bfloat16(v));
}

/// The window of the step's row number `row`: what is before the step comes from the step's window, the rest from `inputs`.
__device__ __forceinline__ void window_of(uint16_t (&past)[kTaps - 1], int row,
                                          const uint16_t (&inputs)[kTaps]) {
    static_assert(kTaps == 4);
    const uint16_t a = past[0], b = past[1], c = past[2];
    past[0] = row == 0 ? a : row == 1 ? b : row == 2 ? c : inputs[0];
    past[1] = row == 0 ? b : row == 1 ? c : inputs[1];
    past[2] = row == 0 ? c : inputs[2];
}

/// Whether the block writes what the blocks of a key head share. Where a ticket decides that, its atomic is under way until the first
/// batch needs to know.
struct KeyWriter {
    bool writes;
    unsigned blocks = 0, before = 0;  // of a ticket, which thread 0 has

    /// All threads, when they have read what may be overwritten.
    __device__ __forceinline__ void ask(unsigned* counter, unsigned count) {
        blocks = count;
        __syncthreads();
        if (threadIdx.x == 0) before = take_ticket(counter, blocks);
    }
    /// Thread 0.
    __device__ __forceinline__ bool decide() const { return blocks == 0 ? writes : before + 1 == blocks; }
};

/// A sequence's rows [begin, end), one batch after another.
template <int kSplit>
struct RowsBlock {
    static constexpr int kBatch = kBatchOf<kSplit>;
    static constexpr int kOwn = kDim / kSplit, kPasses = kOwn / kWarps / 2;
    static constexpr int kParts = kOwn / 32;                // of a row's outputs
    static constexpr int kEnds = kBatch * kParts / kWarps;  // of all rows' parts, a warp's
    const DeltaStep& d;
    BatchMemory<kBatch>& memory;
    SharedOutputs<kSplit>& shared_outputs;
    const Channels& own;
    const Entries& entries;
    const KeyWriter& writer;
    int head, share, begin, end, first;
    /// Of the thread's outputs; of the head's gates. Asked for before the wait, as they come from memory.
    float norm, rate, bias;

    /// Number n of a warp's shares of a batch: 32 outputs of a row.
    struct End {
        int row, element;
        __device__ __forceinline__ End(int n, int share)
            : row((static_cast<int>(threadIdx.x) / 32 + n * kWarps) / kParts),
              element(share * kOwn + (static_cast<int>(threadIdx.x) / 32 + n * kWarps) % kParts * 32 +
                      static_cast<int>(threadIdx.x) % 32) {}
        /// Its channel of v.
        __device__ __forceinline__ int channel(const DeltaStep& d, int head) const {
            return 2 * d.key_heads * kDim + head * kDim + element;
        }
    };

    /// Inputs of a batch's convolution that a thread needs: of its channel of q or k, a row each; of its outputs of v, their windows.
    struct Inputs {
        uint16_t qk[kBatch], v[kEnds][kTaps];
    };
    /// Of `count` rows from `base` on. Rows beyond are copies of the last one, so that no row waits for another; a batch that has such
    /// rows is the last one. Instead of rows before the step, its first one: convolve() has the window.
    __device__ __forceinline__ void load_inputs(int base, int count, Inputs& u) const {
        const int ld = static_cast<int>(d.u_ld);  // of few rows, so that offsets have 32 bits
        const auto* rows = static_cast<const uint16_t*>(d.u) + static_cast<int64_t>(base) * d.u_ld;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) u.qk[i] = load_row(rows + own.qk, min(i, count - 1) * ld);
#pragma unroll
        for (int n = 0; n < kEnds; ++n) {
            const End at(n, share);
            const int first_row = min(at.row, count - 1) - (kTaps - 1);
#pragma unroll
            for (int j = 0; j < kTaps; ++j)
                u.v[n][j] = load_row(rows + at.channel(d, head), max(begin - base, first_row + j) * ld);
        }
    }
    /// q and k, a thread a channel; v of the block's outputs, a thread an output of a row.
    __device__ __forceinline__ void convolve(int base, int count, const Inputs& u, Channel& of_qk,
                                             const Channel (&of_v)[kEnds]) const {
        float x[kBatch + kEnds];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) x[i] = of_qk.sum_next(u.qk[i]);
#pragma unroll
        for (int n = 0; n < kEnds; ++n) {
            Channel channel = of_v[n];
            const int row = base + min(End(n, share).row, count - 1);
            window_of(channel.past, row - begin, u.v[n]);
            x[kBatch + n] = channel.sum_next(u.v[n][kTaps - 1]);
        }
        activate(x);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            memory.qk[i][threadIdx.x] = x[i];
            memory.inputs[i][threadIdx.x] = u.qk[i];
            write_square(x[i], memory.squares[i]);
        }
#pragma unroll
        for (int n = 0; n < kEnds; ++n) {
            const End at(n, share);
            memory.v[at.row][at.element] = x[kBatch + n];
            memory.v_inputs[at.row][at.element] = u.v[n][kTaps - 1];
        }
    }
    /// A thread a row.
    __device__ __forceinline__ void make_gates(int base, int count) const {
        if (static_cast<int>(threadIdx.x) >= count) return;
        const int64_t at = (base + threadIdx.x) * d.ab_ld + head;
        memory.gates[threadIdx.x] = gates_of(load_row(d.a, at), load_row(d.b, at), rate, bias);
    }

    /// A warp a row: norms q and k.
    __device__ __forceinline__ void norm_keys(int count) const {
        static_assert(kBatch <= kWarps);
        const int i = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
        if (i >= count) return;
        const Keys keys(memory.qk[i], memory.squares[i], lane % 16);
        __syncwarp();
        const bool is_q = lane < 16;
        auto* to = reinterpret_cast<float4*>(memory.qk[i] + (is_q ? 0 : kDim)) + lane % 16;
        to[0] = is_q ? keys.q0 : keys.k0, to[16] = is_q ? keys.q1 : keys.k1;
        if (lane == 0) memory.products[i] = keys.product;
    }

    /// The delta rule of row i of the batch.
    __device__ __forceinline__ void advance_row(StateRows<kPasses>& rows, int i, int turn) const {
        const int lane = threadIdx.x % 32;
        const Keys keys(memory.qk[i], memory.products[i], lane % 16);
        const Gates gates = memory.gates[i];
        float* o = memory.outputs[turn % 2][i];
#pragma unroll
        for (int pass = 0; pass < kPasses; pass += kTogether) {
            float4 s[kTogether][2];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) s[j][0] = rows.s[pass + j][0], s[j][1] = rows.s[pass + j][1];
            const RowSums sums(s, keys, gates, memory.v[i], first, pass, lane);
            if (sums.has_output(lane)) shared_outputs.share(turn, &o[sums.own], sums.output);
            if (sums.has_delta(lane)) memory.deltas[i][sums.own] = sums.delta_of_own;
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const float delta = sums.delta_of(j, lane);
                rows.s[pass + j][0] = advance4(s[j][0], gates.decay, delta, keys.k0);
                rows.s[pass + j][1] = advance4(s[j][1], gates.decay, delta, keys.k1);
            }
        }
    }

    /// What the batch leaves for later steps: the journal's entries, the convolution's inputs.
    __device__ __forceinline__ void leave(int base, int count, uint16_t* ring, int place,
                                          int channels) const {
        const int thread = static_cast<int>(threadIdx.x), entry = base - begin;
        if (entries.journaling) {
            constexpr int kWarpRows = kOwn / kWarps;  // of S: what the warp itself wrote
            const int from = share * kOwn + thread / 32 * kWarpRows;
            __syncwarp();
#pragma unroll 1
            for (int at = thread % 32; at < count * kWarpRows; at += 32) {
                const int i = at / kWarpRows, row = from + at % kWarpRows;
                entries.u[(entry + i) * entries.u_step + row] = memory.deltas[i][row];
            }
            if (memory.writes_keys && !own.is_q)
#pragma unroll 1
                for (int i = 0; i < count; ++i)
                    entries.k[(entry + i) * entries.k_step + own.element] = memory.qk[i][thread];
        }
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            uint16_t* to = ring + static_cast<int64_t>(place) * channels;
            if (memory.writes_keys) to[own.qk] = memory.inputs[i][thread];
            if (own.has_output) to[own.v] = memory.v_inputs[i][own.element];
            place = place + 1 == d.ring ? 0 : place + 1;
        }
    }

    __device__ __forceinline__ void run(StateRows<kPasses>& rows, Channel& of_qk,
                                        const Channel (&of_v)[kEnds], uint16_t* ring, int place, int channels,
                                        float* state) const {
        int turn = 0;
#pragma unroll 1
        for (int base = begin; base < end; base += kBatch, ++turn) {
            const int count = min(kBatch, end - base);
            if (turn > 0) __syncthreads();  // what the batch before leaves was read by all warps
            shared_outputs.expect(turn, count * kDim);
            uint16_t z[kEnds];
#pragma unroll
            for (int n = 0; n < kEnds; ++n) {
                const End at(n, share);
                z[n] = load_row(d.z, (base + min(at.row, count - 1)) * d.z_ld + head * kDim + at.element);
            }
            Inputs inputs;
            load_inputs(base, count, inputs);
            make_gates(base, count);
            convolve(base, count, inputs, of_qk, of_v);
            if (turn == 0 && threadIdx.x == 0) memory.writes_keys = writer.decide();
            __syncthreads();
            norm_keys(count);
            __syncthreads();
#pragma unroll 1
            for (int i = 0; i < count; ++i) advance_row(rows, i, turn);
            leave(base, count, ring, place, channels);
            place += count;
            while (place >= d.ring) place -= d.ring;
            if (base + kBatch >= end && !entries.journaling) rows.store(state);
            shared_outputs.wait(turn);  // so all blocks of the head have applied the entries that were here
            if (entries.journaling && share == 0 && static_cast<int>(threadIdx.x) < count)
                entries.g[(base - begin + threadIdx.x) * entries.g_step] = memory.gates[threadIdx.x].g;
#pragma unroll
            for (int n = 0; n < kEnds; ++n) {
                const End at(n, share);
                if (at.row < count)
                    store_gated(d, memory.outputs[turn % 2][at.row], base + at.row, head, at.element, norm,
                                as_float(z[n]));
            }
        }
    }
};

template <int kSplit>
__device__ __forceinline__ void decode_rows(const DeltaStep& d) {
    using Block = RowsBlock<kSplit>;
    using Copies = EntryCopies<Block::kOwn>;
    __shared__ BatchMemory<kBatchOf<kSplit>> memory;
    __shared__ typename Copies::Memory entry_memory;
    __shared__ SharedOutputs<kSplit> shared_outputs;
    const int sequence = blockIdx.y, head = blockIdx.x / kSplit, share = blockIdx.x % kSplit;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int group = quotient(d.value_heads, d.key_heads), key_head = quotient(head, group);
    const int channels = (2 * d.key_heads + d.value_heads) * kDim;
    allow_successor();
    shared_outputs.begin();

    // Nothing before the wait waits for the predecessor: only earlier steps wrote what is read here, and S belongs to this kernel.
    // First what needs the slot alone, then what needs the position, too: some blocks begin when the predecessor is about to end.
    const int64_t slot = d.slots[sequence];
    const int begin = d.start[sequence], end = d.start[sequence + 1];
    const Entries entries(d, sequence, slot, key_head, head);
    const int own_first = warp * (Block::kOwn / kWarps) + lane / 16;  // row of S among the block's
    const int first = share * Block::kOwn + own_first;
    float* state = d.delta + ((slot * d.value_heads + head) * kDim + first) * kDim + 4 * (lane % 16);
    StateRows<Block::kPasses> rows;
    rows.load(state, false);
    const Copies copies{entry_memory, entries, share};
    if (d.journal.k != nullptr) copies.ask(d.journal.entries);
    const bool active = end > begin;
    const int position = active ? d.positions[begin] : 0;
    const float norm = d.norm[Block::End(0, share).element], rate = d.decay_rate[head],
                bias = d.dt_bias[head];
    const int place = position - quotient(position, d.ring) * d.ring;  // of the first row in the ring
    const bool fresh = position == 0;
    const Channels own(d, key_head, head, Block::kOwn, share);
    Channel of_qk, of_v[Block::kEnds];
    of_qk.early(d, own.qk, slot, position, place, channels);
#pragma unroll
    for (int n = 0; n < Block::kEnds; ++n)
        of_v[n].early(d, typename Block::End(n, share).channel(d, head), slot, position, place, channels);
    if (fresh) rows = {};
    if (entries.committed > 0)
        commit<Block::kOwn>(rows, entry_memory, entries.committed, own_first, lane % 16);
    // Which block writes the key head's entries of k and rings of q and k: where others may still have to read what is there, the
    // last one.
    KeyWriter writer{key_head * group == head && share == 0};
    if (active && ((entries.journaling && entries.committed > 0) || end - begin > d.ring - (kTaps - 1)))
        writer.ask(d.counters + sequence * d.key_heads + key_head, group * kSplit);
    if (active && entries.journaling && (entries.committed > 0 || fresh)) rows.store(state);
    shared_outputs.wait_for_all_blocks();
    wait_for_predecessor();
    wait_copies<0>();  // of entries that are not committed
    if (!active) return;

    auto* ring = static_cast<uint16_t*>(d.conv_state) + slot * d.ring * channels;
    Block block{d,     memory, shared_outputs, own,  entries, writer, head, share,
                begin, end,    first,          norm, rate,    bias};
    block.run(rows, of_qk, of_v, ring, place, channels, state);
}

__global__ void __launch_bounds__(kBlock, 2) decode_rows_kernel(DeltaStep d) { decode_rows<1>(d); }

CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kBlock, 2) decode_rows_split_kernel(DeltaStep d) {
    decode_rows<kSplitBlocks>(d);
}

}  // namespace

void decode_rows(Context& c, const DeltaStep& d, bool split) {
    if (d.journal.k != nullptr && d.journal.entries > DeltaJournal::kMaxEntries)
        unsupported("conv_gated_delta_net", "a journal of so many entries");
    if (split)
        launch(c, "conv_gated_delta_net rows split", decode_rows_split_kernel,
               dim3(d.value_heads * kSplitBlocks, d.sequences), kBlock, 0, d);
    else
        launch(c, "conv_gated_delta_net rows", decode_rows_kernel, dim3(d.value_heads, d.sequences), kBlock,
               0, d);
}

}  // namespace quern::cuda::delta
