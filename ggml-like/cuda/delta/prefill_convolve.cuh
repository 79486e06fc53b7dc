// prefill_prepare.cu's first part: the causal convolution with SiLU of a chunk's heads.
//
//   warp = 8 rows of the chunk, or 4; lanes 0 .. 15 have one head, 8 channels each, lanes 16 .. 31 the next head
//
// A lane's inputs come by way of shared memory that is its own, so that no warp waits for another: once it has them in registers, it asks for
// those of the next two heads, or of the block's next unit, before it computes.
#pragma once

#include "ggml-like/cuda/delta/prefill.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kWindow = 3;  // rows before its own that a row's convolution sees

/// 8 channels of kRows rows, and of those before them that they see.
template <int kRows>
using Rows = uint32_t[kWindow + kRows][4];

/// Rows of all lanes of a block, on their way.
template <int kWarps>
using Staged = uint4[kWindow + kChunk / kWarps][32 * kWarps];

/// A chunk of a sequence.
struct Chunk {
    int sequence;
    int index;   // in its sequence
    int row;     // its first row in the batch
    int rows;    // 1..64
    int begin;   // the sequence's first row
    int length;  // of the sequence
};

/// SiLU. Subnormal numbers on the way are flushed to zero, which saves the instructions that scale them.
__device__ __forceinline__ float silu(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return x * inverse;
}

/// First channel of head `head` of `heads` of a key head: 0 is q, 1 is k, then come the value heads.
__device__ __forceinline__ int head_column(const DeltaStep& p, int key_head, int head, int heads) {
    if (head < 2) return (head * p.key_heads + key_head) * kDim;
    return (2 * p.key_heads + key_head * (heads - 2) + head - 2) * kDim;
}

/// The 8 channels of one head that a lane has.
struct HeadChannels {
    const DeltaStep& p;
    const Chunk& chunk;
    int channels, column;
    bool there;

    __device__ __forceinline__ HeadChannels(const DeltaStep& step, const Chunk& c, int key_head, int head,
                                            int heads, int lane)
        : p(step), chunk(c) {
        channels = (2 * p.key_heads + p.value_heads) * kDim;
        there = head < heads;
        column = there ? head_column(p, key_head, head, heads) + lane % 16 * 8 : 0;
    }
    __device__ __forceinline__ const float4* taps() const {
        return reinterpret_cast<const float4*>(p.conv) + column;
    }
    /// Of row `row` of the chunk.
    __device__ __forceinline__ const bf16* input(int row) const {
        return static_cast<const bf16*>(p.u) + column + int64_t{chunk.row + row} * p.u_ld;
    }
    __device__ __forceinline__ bf16* output(int row) const {
        return static_cast<bf16*>(p.x) + int64_t{chunk.row + row} * channels + column;
    }
    /// Row of the ring that holds the input of a position.
    __device__ __forceinline__ bf16* ring_row(int position) const {
        return static_cast<bf16*>(p.conv_state) +
               (static_cast<int64_t>(p.slots[chunk.sequence]) * p.ring + position % p.ring) * channels +
               column;
    }
    /// Asks for the inputs of rows `row` to `row` + kRows - 1 of the chunk, zeros past its end, and of the three rows before them, also of earlier
    /// steps, zeros before the sequence's start.
    template <int kWarps>
    __device__ __forceinline__ void ask_rows(int row, Staged<kWarps>& staged) const {
        constexpr int kRows = kChunk / kWarps;
        const bf16* from = input(row);
        if (chunk.index == 0 && row == 0) {
            const int position = p.positions[chunk.begin];
#pragma unroll 1
            for (int i = 0; i < kWindow; ++i) {
                const int at = position - kWindow + i;
                copy_async16(&staged[i][threadIdx.x], ring_row(max(at, 0)), at >= 0);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kWindow; ++i)
                copy_async16(&staged[i][threadIdx.x], from + (i - kWindow) * p.u_ld);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r, from += p.u_ld)
            copy_async16(&staged[kWindow + r][threadIdx.x], from, row + r < chunk.rows);
    }
    /// The step's last inputs go to the ring, once convolve has read it.
    __device__ __forceinline__ void save_window() const {
        constexpr int kTogether = 4;
        const int position = p.positions[chunk.begin];
        for (int from = max(0, chunk.length - p.ring); from < chunk.length; from += kTogether) {
            uint4 rows[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                if (from + i < chunk.length) rows[i] = *reinterpret_cast<const uint4*>(input(from + i));
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
                if (from + i < chunk.length)
                    *reinterpret_cast<uint4*>(ring_row(position + from + i)) = rows[i];
        }
    }
};

/// Taps of two neighbouring channels.
struct TwoTaps {
    float4 low, high;
};
/// rows[3..]: inputs, which become outputs; rows[0..2]: the inputs before them. A loop over pairs of channels
/// that rotates each row's registers, since unrolled code takes longer to fetch than to run. `two`: the first two channels' taps.
template <int kRows>
__device__ __forceinline__ void convolve_rows(Rows<kRows>& rows, const float4* taps, TwoTaps two) {
#pragma unroll 1
    for (int e = 0; e < 4; ++e) {
        const TwoTaps now = two;
        if (e < 3) two = {taps[2 * e + 2], taps[2 * e + 3]};
        float2 x0 = unpack(rows[0][0]), x1 = unpack(rows[1][0]), x2 = unpack(rows[2][0]);
#pragma unroll
        for (int r = 0; r < kWindow + kRows; ++r) {
            uint32_t y = 0;
            if (r >= kWindow) {
                const float2 x3 = unpack(rows[r][0]);
                const float4 &lo = now.low, &hi = now.high;
                y = pack_bf16(silu(lo.x * x0.x + lo.y * x1.x + lo.z * x2.x + lo.w * x3.x),
                              silu(hi.x * x0.y + hi.y * x1.y + hi.z * x2.y + hi.w * x3.y));
                x0 = x1, x1 = x2, x2 = x3;
            }
#pragma unroll
            for (int i = 0; i < 3; ++i) rows[r][i] = rows[r][i + 1];
            rows[r][3] = y;
        }
    }
}

/// Which of a key head's heads a block convolves: `first` and the next, `first` + `step` and the next, and so on, of `count`.
struct BlockHeads {
    int key_head, first, step, count;

    BlockHeads() = default;
    /// Unit `unit` of the `units` of a chunk.
    __device__ __forceinline__ BlockHeads(const DeltaStep& p, int unit, int units) {
        const Divisor key_heads(p.key_heads);
        first = 2 * key_heads.quotient(unit);
        step = 2 * key_heads.quotient(units);
        count = 2 + key_heads.quotient(p.value_heads);
        key_head = unit - first / 2 * p.key_heads;
    }
    __device__ __forceinline__ bool has_keys() const { return first == 0; }
};

/// Some heads of a chunk.
struct Unit {
    int left;  // that the block may do, this one among them; 0: there is none
    int chunk_of_step;
    BlockHeads heads;
    Chunk chunk;
};

__device__ __forceinline__ void prefetch_taps(const DeltaStep& p, const BlockHeads& heads, int lane) {
    const Chunk none{};
    for (int head = heads.first + lane / 16; head < heads.count; head += heads.step)
        prefetch_line(HeadChannels(p, none, heads.key_head, head, heads.count, lane).taps());
}

/// Asks for the inputs of heads `first` and the next of a chunk.
template <int kWarps>
__device__ __forceinline__ void ask_heads(const DeltaStep& p, const Chunk& chunk, const BlockHeads& heads,
                                          int first, int warp, int lane, Staged<kWarps>& staged) {
    const int row = kChunk / kWarps * warp;
    const HeadChannels own(p, chunk, heads.key_head, first + lane / 16, heads.count, lane);
    if (own.there && row < chunk.rows) own.ask_rows<kWarps>(row, staged);
}

/// x, and of q and k also the tiles of x_q and x_k in shared memory. The first heads' inputs have been asked for; it asks for the next
/// unit's.
template <int kWarps>
__device__ __forceinline__ void convolve(const DeltaStep& p, const Unit& unit, const Unit& next, int warp,
                                         int lane, Staged<kWarps>& staged,
                                         unsigned char (&tiles)[2][kTileBytes]) {
    const BlockHeads& heads = unit.heads;
    const Chunk& chunk = unit.chunk;
    constexpr int kRows = kChunk / kWarps;
    const int row = kRows * warp;
#pragma unroll 1
    for (int head = heads.first; head < heads.count; head += heads.step) {
        const HeadChannels own(p, chunk, heads.key_head, head + lane / 16, heads.count, lane);
        const TwoTaps two{own.taps()[0], own.taps()[1]};
        Rows<kRows> rows;
        wait_copies<0>();
#pragma unroll
        for (int i = 0; i < kWindow + kRows; ++i) {
            const uint4 v = staged[i][threadIdx.x];
            rows[i][0] = v.x, rows[i][1] = v.y, rows[i][2] = v.z, rows[i][3] = v.w;
        }
        asm volatile("" ::: "memory");  // read before they are overwritten
        const bool more = head + heads.step < heads.count;
        if (more || next.left > 0)
            ask_heads<kWarps>(p, more ? chunk : next.chunk, more ? heads : next.heads,
                              more ? head + heads.step : next.heads.first, warp, lane, staged);
        commit_copies();
        if (!own.there) continue;
        if (row < chunk.rows) convolve_rows<kRows>(rows, own.taps(), two);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const bool valid = row + r < chunk.rows;
            const uint32_t(&from)[4] = rows[kWindow + r];
            const uint4 v = valid ? make_uint4(from[0], from[1], from[2], from[3]) : make_uint4(0, 0, 0, 0);
            if (valid) *reinterpret_cast<uint4*>(own.output(row + r)) = v;
            if (head == 0) *reinterpret_cast<uint4*>(tiles[lane / 16] + tile_byte(row + r, lane % 16)) = v;
        }
    }
}

/// One warp, of a sequence's first chunk, once all windows have been loaded: the ring of the block's heads.
__device__ __forceinline__ void save_windows(const DeltaStep& p, const Chunk& chunk, const BlockHeads& heads,
                                             int lane) {
#pragma unroll 1
    for (int head = heads.first; head < heads.count; head += heads.step) {
        const HeadChannels own(p, chunk, heads.key_head, head + lane / 16, heads.count, lane);
        if (own.there) own.save_window();
    }
}

}  // namespace quern::cuda::delta
