// Answer steps that verify drafts, several rows of a sequence: the work of decode.cu, in batches of rows.
//
//   block, cluster   as in decode.cu: (sequence, value head), or a cluster of four blocks that share a head's rows of S
//   batch            up to 8 rows (4 where a block has a whole head); the block meets three times in it, not twice a row
//
//     convolution, gates   all rows' inputs are loaded at once; q and k: a thread a channel goes from row to row; v: a thread an
//                          output of a row; gates: a warp a row, all its threads the same
//     delta rule           a half warp has its rows of S in registers and takes row after row without waiting for others
//     norm, output gate    outputs of all rows, a warp 32 of them
//
//   What later steps need is written while the blocks of a head wait for each other's outputs.
//
//   A row's operations are those of decode.cu (decode_row.cuh) in the same order: the same bits.
//
// Journal: as in decode.cu. All entries are asked for with S, before it is known how many of them are committed.
//
// Shared memory: inputs and outputs of a batch, and entries: 41 KB, of blocks that have a whole head 32.
//
// Traffic: as of decode.cu, and entries. Bound: latency of a row's sums over S, which the next row needs; one load from L2 a
// batch. Some clusters get an SM only when the predecessor is about to end; for them little is early.
#include "ggml-like/cuda/delta/activate.cuh"
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

template <int kBatch, int kOwn>
struct BatchMemory {
    __align__(16) float qk[kBatch][2 * kDim];
    __align__(16) float v[kBatch][kDim];
    __align__(
        16) float outputs[2][kBatch][kDim];  // of all blocks; batches take turns: others may be a batch ahead
    float own_outputs[kOwn < kDim ? kBatch : 1][kOwn], deltas[kBatch][kOwn];
    float squares[kBatch][kWarps], products[kBatch];  // of q and k
    Gates gates[kBatch];
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

/// The window of the step's row number `row`: what is before the step comes from the step's window, the rest from `inputs`.
__device__ __forceinline__ void window_of(uint16_t (&past)[kTaps - 1], int row,
                                          const uint16_t (&inputs)[kTaps]) {
    static_assert(kTaps == 4);
    const uint16_t a = past[0], b = past[1], c = past[2];
    past[2] = row >= 1 ? inputs[2] : c;
    past[1] = row >= 2 ? inputs[1] : row == 1 ? c : b;
    past[0] = row >= 3 ? inputs[0] : row == 2 ? c : row == 1 ? b : a;
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
    static constexpr int kWarpRows = kOwn / kWarps;         // of S
    const DeltaStep& d;
    BatchMemory<kBatch, kOwn>& memory;
    SharedOutputs<kSplit>& shared_outputs;
    const Channels& own;
    const Entries& entries;
    const KeyWriter& writer;
    const GateWeights& gate_weights;
    int head, share, begin, end, first;
    float norm;  // of the thread's outputs; asked for before the wait, as it comes from memory

    __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

    /// Number n of a warp's shares of a batch: 32 outputs of a row.
    struct End {
        int row, element;
        __device__ __forceinline__ End(int n, int share)
            : row((warp() + n * kWarps) / kParts),
              element(share * kOwn + (warp() + n * kWarps) % kParts * 32 + lane()) {}
        /// Its channel of v.
        __device__ __forceinline__ int channel(const DeltaStep& d, int head) const {
            return 2 * d.key_heads * kDim + head * kDim + element;
        }
    };

    /// Where a thread's inputs of `count` rows from `base` on are. Rows beyond are copies of the last one, so that no row waits for
    /// another; a batch that has such rows is the last one.
    struct Sources {
        const uint16_t *qk, *v[kEnds];     // of row `base`
        const uint16_t *z[kEnds], *a, *b;  // of the thread's rows

        __device__ __forceinline__ Sources(const RowsBlock& r, int base, int count) {
            const DeltaStep& d = r.d;
            const auto* u = static_cast<const uint16_t*>(d.u) + base * d.u_ld;
            qk = u + r.own.qk;
#pragma unroll
            for (int n = 0; n < kEnds; ++n) {
                const End at(n, r.share);
                v[n] = u + at.channel(d, r.head);
                z[n] = static_cast<const uint16_t*>(d.z) + (base + min(at.row, count - 1)) * d.z_ld +
                       r.head * kDim + at.element;
            }
            const int64_t gates = (base + min(warp(), count - 1)) * d.ab_ld + r.head;
            a = static_cast<const uint16_t*>(d.a) + gates, b = static_cast<const uint16_t*>(d.b) + gates;
        }
        __device__ __forceinline__ void pin_all() {
            pin(qk), pin(a), pin(b);
#pragma unroll
            for (int n = 0; n < kEnds; ++n) pin(v[n]), pin(z[n]);
        }
    };
    /// Inputs of a batch that a thread needs: of its channel of q or k, a row each; of its outputs of v, their windows; of a warp's row
    /// the gates.
    struct Inputs {
        uint16_t qk[kBatch], v[kEnds][kTaps], z[kEnds], a, b;

        /// Instead of rows before the step, its first one: convolve() has the window.
        __device__ __forceinline__ Inputs(const RowsBlock& r, const Sources& from, int base, int count) {
            const int pitch = 2 * static_cast<int>(r.d.u_ld);  // so that an address is one multiplication
            const auto row = [&](const uint16_t* of_base, int n) {
                return __ldcg(reinterpret_cast<const uint16_t*>(reinterpret_cast<const uint8_t*>(of_base) +
                                                                int64_t{n} * pitch));
            };
#pragma unroll
            for (int i = 0; i < kBatch; ++i) qk[i] = row(from.qk, min(i, count - 1));
#pragma unroll
            for (int n = 0; n < kEnds; ++n) {
                const int first_row = min(End(n, r.share).row, count - 1) - (kTaps - 1);
#pragma unroll
                for (int j = 0; j < kTaps; ++j) v[n][j] = row(from.v[n], max(r.begin - base, first_row + j));
                z[n] = __ldcg(from.z[n]);
            }
            a = __ldcg(from.a), b = __ldcg(from.b);
        }
    };

    /// q and k, a thread a channel; v of the block's outputs, a thread an output of a row; returns the gates of the warp's row.
    __device__ __forceinline__ Gates convolve(int base, int count, const Inputs& in, Channel& of_qk,
                                              const Channel (&of_v)[kEnds]) const {
        float x[kBatch + kEnds];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) x[i] = of_qk.sum_next(in.qk[i]);
#pragma unroll
        for (int n = 0; n < kEnds; ++n) {
            Channel channel = of_v[n];
            const int row = base + min(End(n, share).row, count - 1);
            window_of(channel.past, row - begin, in.v[n]);
            x[kBatch + n] = channel.sum_next(in.v[n][kTaps - 1]);
        }
        const Gates gates = activate(x, in.a, in.b, gate_weights);
        float squares[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) memory.qk[i][threadIdx.x] = x[i], squares[i] = __fmul_rn(x[i], x[i]);
#pragma unroll
        for (int n = 0; n < kEnds; ++n) {
            const End at(n, share);
            memory.v[at.row][at.element] = x[kBatch + n];
        }
        constexpr int kLanesOfRow = 32 / kBatch;
        const float sum = lane_sums<32>(squares);  // as write_square adds them
        if (lane() % kLanesOfRow == 0) memory.squares[lane() / kLanesOfRow][warp()] = sum;
        if (lane() == 0 && warp() < count) memory.gates[warp()] = gates;
        return gates;
    }

    /// A warp a row: norms q and k, and writes the journal's k.
    __device__ __forceinline__ void norm_keys(int base, int count) const {
        static_assert(kBatch <= kWarps);
        const int i = warp();
        if (i >= count) return;
        const Keys keys(memory.qk[i], memory.squares[i], lane() % 16);
        __syncwarp();
        const bool is_q = lane() < 16;
        auto* to = reinterpret_cast<float4*>(memory.qk[i] + (is_q ? 0 : kDim)) + lane() % 16;
        to[0] = is_q ? keys.q0 : keys.k0, to[16] = is_q ? keys.q1 : keys.k1;
        if (lane() == 0) memory.products[i] = keys.product;
        if (!entries.journaling || !memory.writes_keys || is_q) return;
        auto* entry =
            reinterpret_cast<float4*>(entries.k + (base - begin + i) * entries.k_step) + lane() % 16;
        entry[0] = keys.k0, entry[16] = keys.k1;
    }

    /// The delta rule of row i of the batch.
    __device__ __forceinline__ void advance_row(StateRows<kPasses>& rows, int i, int turn) const {
        const Keys keys(memory.qk[i], memory.products[i], lane() % 16);
        const Gates gates = memory.gates[i];
        float* o = kSplit == 1 ? memory.outputs[turn % 2][i] : memory.own_outputs[i];
#pragma unroll
        for (int pass = 0; pass < kPasses; pass += kTogether) {
            float4 s[kTogether][2];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) s[j][0] = rows.s[pass + j][0], s[j][1] = rows.s[pass + j][1];
            const RowSums sums(s, keys, gates, memory.v[i], first + 2 * pass, lane());
            const int row = sums.own - share * kOwn;
            if (RowSums::has_output(lane())) o[row] = sums.output;
            if (RowSums::has_delta(lane())) memory.deltas[i][row] = sums.delta_of_own;
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const float delta = sums.delta_of(j, lane());
                rows.s[pass + j][0] = advance4(s[j][0], gates.decay, delta, keys.k0);
                rows.s[pass + j][1] = advance4(s[j][1], gates.decay, delta, keys.k1);
            }
        }
    }

    /// What the warp's rows of S gave: outputs to all blocks, deltas to the journal.
    __device__ __forceinline__ void hand_out(int base, int count, int turn) const {
        __syncwarp();
#pragma unroll 1
        for (int at = lane(); at < count * kWarpRows; at += 32) {
            const int i = at / kWarpRows, row = warp() * kWarpRows + at % kWarpRows;
            if constexpr (kSplit > 1)
                typename SharedOutputs<kSplit>::Target(shared_outputs, turn,
                                                       memory.outputs[turn % 2][i] + share * kOwn + row)
                    .send(memory.own_outputs[i][row]);
            if (entries.journaling)
                entries.u[(base - begin + i) * entries.u_step + share * kOwn + row] = memory.deltas[i][row];
        }
    }
    /// The convolution's inputs, for later steps. place: of the batch's first row in the ring.
    __device__ __forceinline__ void leave_inputs(int count, const Inputs& in, uint16_t* ring, int place,
                                                 int channels) const {
        if (memory.writes_keys) {
            int p = place;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (i < count) ring[static_cast<int64_t>(p) * channels + own.qk] = in.qk[i];
                p = p + 1 == d.ring ? 0 : p + 1;
            }
        }
#pragma unroll
        for (int n = 0; n < kEnds; ++n) {
            const End at(n, share);
            const int p = place + at.row;
            if (at.row >= count || at.row + d.ring < count) continue;  // a later row has its place
            ring[static_cast<int64_t>(p - quotient(p, d.ring) * d.ring) * channels + at.channel(d, head)] =
                in.v[n][kTaps - 1];
        }
    }

    __device__ __forceinline__ int count_from(int base) const { return min(kBatch, end - base); }

    __device__ __forceinline__ void run(StateRows<kPasses>& rows, const Sources& first_batch, Channel& of_qk,
                                        const Channel (&of_v)[kEnds], uint16_t* ring, int place, int channels,
                                        float* state) const {
        int base = begin;
        Inputs in(*this, first_batch, base, count_from(base));
#pragma unroll 1
        for (int turn = 0;; ++turn) {
            const int count = count_from(base);
            const Gates gates = convolve(base, count, in, of_qk, of_v);
            if (turn == 0 && threadIdx.x == 0) memory.writes_keys = writer.decide();
            __syncthreads();
            norm_keys(base, count);
            __syncthreads();
#pragma unroll 1
            for (int i = 0; i < count; ++i) advance_row(rows, i, turn);
            hand_out(base, count, turn);
            leave_inputs(count, in, ring, place, channels);
            if (base + kBatch >= end && !entries.journaling) rows.store(state);
            float gate[kEnds];
#pragma unroll
            for (int n = 0; n < kEnds; ++n) gate[n] = output_gate(in.z[n]);
            shared_outputs.wait(
                turn);  // so all blocks of the head have applied the entries that were here, and all warps have read theirs
            if (entries.journaling && share == 0 && lane() == 0 && warp() < count)
                entries.g[(base - begin + warp()) * entries.g_step] = gates.g;
#pragma unroll
            for (int n = 0; n < kEnds; ++n) {
                const End at(n, share);
                if (at.row < count)
                    store_gated(d, memory.outputs[turn % 2][at.row], at.element, norm, gate[n],
                                gated_output(d, base + at.row, head, at.element));
            }
            base += kBatch, place += count;
            if (base >= end) break;
            place -= quotient(place, d.ring) * d.ring;
            in = Inputs(*this, Sources(*this, base, count_from(base)), base, count_from(base));
            shared_outputs.expect(turn + 1, count_from(base) * kDim);
        }
    }
};

template <int kSplit>
__device__ __forceinline__ void decode_rows(const DeltaStep& d) {
    using Block = RowsBlock<kSplit>;
    using Copies = EntryCopies<Block::kOwn>;
    __shared__ BatchMemory<kBatchOf<kSplit>, Block::kOwn> memory;
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
    const float norm = d.norm[typename Block::End(0, share).element];
    const GateWeights gate_weights(d, head);
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
    const Block block{d,    memory, shared_outputs, own, entries, writer, gate_weights,
                      head, share,  begin,          end, first,   norm};
    typename Block::Sources sources(block, begin, active ? block.count_from(begin) : 1);
    sources.pin_all();
    if (active) shared_outputs.expect(0, block.count_from(begin) * kDim);
    shared_outputs.wait_for_all_blocks();
    wait_for_predecessor();
    wait_copies<0>();  // of entries that are not committed
    if (!active) return;

    auto* ring = static_cast<uint16_t*>(d.conv_state) + slot * d.ring * channels;
    block.run(rows, sources, of_qk, of_v, ring, place, channels, state);
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
