// prefill_prepare.cu's first part: the causal convolution with SiLU of a chunk's heads.
//
//   warp = 16 rows of the chunk, 8 at a time; lanes 0 .. 15 have one head, 8 channels each, lanes 16 .. 31 the next
//   head
#pragma once

#include "ggml-like/cuda/delta/prefill.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kWindow = 3;  // rows before its own that a row's convolution sees

/// A chunk of a sequence.
struct Chunk {
    int sequence;
    int index;   // in its sequence
    int row;     // its first row in the batch
    int rows;    // 1..64
    int begin;   // the sequence's first row
    int length;  // of the sequence
};

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ void load_row(uint32_t (&to)[4], const bf16* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/// First channel of head `head` of a block: 0 is q, 1 is k, then come the value heads.
__device__ __forceinline__ int head_column(const DeltaStep& p, int key_head, int head) {
    if (head < 2) return (head * p.key_heads + key_head) * kDim;
    return (2 * p.key_heads + key_head * (p.value_heads / p.key_heads) + head - 2) * kDim;
}

/// Row of the ring that holds the input of a position.
__device__ __forceinline__ bf16* ring_row(const DeltaStep& p, bf16* ring, int position, int channels) {
    return ring + static_cast<int64_t>(position % p.ring) * channels;
}

/// The inputs of up to three positions before `position`; zeros before the sequence's start.
__device__ __forceinline__ void load_window(const DeltaStep& p, bf16* ring, int position, int channels,
                                            uint32_t (&window)[11][4]) {
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
        const int at = position - kWindow + i;
        if (at >= 0) load_row(window[i], ring_row(p, ring, at, channels));
    }
}

/// The step's last inputs go to the ring, of which only this thread reads or writes these 8 channels.
__device__ __forceinline__ void save_window(const DeltaStep& p, bf16* ring, int position, int channels,
                                            const bf16* inputs, int length) {
    for (int from = max(0, length - p.ring); from < length; ++from) {
        uint32_t row[4];
        load_row(row, inputs + from * p.u_ld);
        *reinterpret_cast<uint4*>(ring_row(p, ring, position + from, channels)) =
            make_uint4(row[0], row[1], row[2], row[3]);
    }
}

/// rows[3..10]: inputs, which become outputs; rows[0..2]: the inputs before them, which become the last three inputs.
__device__ __forceinline__ void convolve_rows(uint32_t (&rows)[11][4], const float4* taps) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float4 lo = taps[2 * e], hi = taps[2 * e + 1];
        float2 x0 = unpack(rows[0][e]), x1 = unpack(rows[1][e]), x2 = unpack(rows[2][e]);
        const uint32_t last[3] = {rows[8][e], rows[9][e], rows[10][e]};
#pragma unroll
        for (int r = 3; r < 11; ++r) {
            const float2 x3 = unpack(rows[r][e]);
            rows[r][e] = pack_bf16(silu(lo.x * x0.x + lo.y * x1.x + lo.z * x2.x + lo.w * x3.x),
                                   silu(hi.x * x0.y + hi.y * x1.y + hi.z * x2.y + hi.w * x3.y));
            x0 = x1, x1 = x2, x2 = x3;
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) rows[i][e] = last[i];
    }
}

/// Heads first_head and first_head + 1 of the block: x, and if `tiles` is not null also the tiles of x_q and x_k in
/// shared memory.
__device__ void convolve(const DeltaStep& p, const Chunk& chunk, int key_head, int first_head, int warp,
                         int lane, unsigned char* tiles) {
    const int head = first_head + lane / 16;
    if (head >= 2 + p.value_heads / p.key_heads) return;
    const int channels = (2 * p.key_heads + p.value_heads) * kDim;
    const int column = head_column(p, key_head, head) + lane % 16 * 8;
    const int row = 16 * warp;
    const bf16* u = static_cast<const bf16*>(p.u) + column + chunk.begin * p.u_ld;
    const int64_t first = int64_t{chunk.index} * kChunk + row;  // in the sequence
    uint32_t rows[11][4] = {};
    if (first > 0 && row < chunk.rows) {
#pragma unroll
        for (int i = 0; i < kWindow; ++i) load_row(rows[i], u + (first - kWindow + i) * p.u_ld);
    } else if (first == 0) {
        bf16* ring = static_cast<bf16*>(p.conv_state) +
                     static_cast<int64_t>(p.slots[chunk.sequence]) * p.ring * channels + column;
        load_window(p, ring, p.positions[chunk.begin], channels, rows);
        save_window(p, ring, p.positions[chunk.begin], channels, u, chunk.length);
    }
    const float4* taps = reinterpret_cast<const float4*>(p.conv) + column;
    bf16* x = static_cast<bf16*>(p.x) + int64_t{chunk.row} * channels + column;
#pragma unroll 1
    for (int batch = 0; batch < 2; ++batch) {
        const int top = row + 8 * batch;
        if (top < chunk.rows) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                if (top + r < chunk.rows) {
                    load_row(rows[3 + r], u + (first + 8 * batch + r) * p.u_ld);
                } else {
                    rows[3 + r][0] = rows[3 + r][1] = rows[3 + r][2] = rows[3 + r][3] = 0;
                }
            }
            convolve_rows(rows, taps);
        }
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const bool valid = top + r < chunk.rows;
            const uint4 v = valid ? make_uint4(rows[3 + r][0], rows[3 + r][1], rows[3 + r][2], rows[3 + r][3])
                                  : make_uint4(0, 0, 0, 0);
            if (valid) *reinterpret_cast<uint4*>(x + int64_t{top + r} * channels) = v;
            if (tiles != nullptr)
                *reinterpret_cast<uint4*>(tiles + head * kTileBytes + tile_byte(top + r, lane % 16)) = v;
        }
    }
}

}  // namespace quern::cuda::delta
