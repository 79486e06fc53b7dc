// prefill_scan.cu's products: what a state warp and an output warp do with one chunk.
//
// Right operands of 16 x 16 come from tiles in shared memory, or, of A and P, from the record into registers
// (load_triangle), where they are asked for a chunk ahead.
#pragma once

#include "ggml-like/cuda/delta/prefill_scan.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kSlice = 32;  // v columns of a block

/// What one round reads: the state warps' operands of chunk c, the output warps' of chunk c - 1.
struct Stage {
    unsigned char k[kTileBytes];
    unsigned char q[kTileBytes];
    unsigned char v[kChunk * kSlice * 2];
    float factors[4 * kChunk];  // error, write, last of chunk c; read of chunk c - 1
};

/// What a state warp passes to its output warp, as left operands: the S before the chunk, and U.
struct Passed {
    uint4 state[kDim / 16][32];
    uint4 u[kChunk / 16][32];
};

/// The lane's registers of all blocks of A or P; block (i, j) is number i (i + 1) / 2 + j.
__device__ __forceinline__ void load_triangle(uint4 (&to)[kTriangle], const Triangle& from, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j <= i; ++j) {
            const uint32_t(*m)[32] = from + matrix_of(i, j);
            to[i * (i + 1) / 2 + j] = make_uint4(m[0][lane], m[1][lane], m[2][lane], m[3][lane]);
        }
}

/// Four right operands of 16 x 16.
using FourRight = uint32_t[4][4];

/// sum[first .. first + 7] += (high + low) right. Eight sums lie between the products of one: a warp has a tensor core for itself
/// and would wait for each product with fewer.
template <int kSums>
__device__ __forceinline__ void multiply_four(float (&sum)[kSums][4], int first, const uint32_t (&high)[4],
                                              const uint32_t (&low)[4], const FourRight& right) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        mma(sum[first + i], low, right[i / 2][i % 2 * 2], right[i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        mma(sum[first + i], high, right[i / 2][i % 2 * 2], right[i / 2][i % 2 * 2 + 1]);
}

/// Of a tile of 64 rows: columns 16d .. 16d + 15, for left tile^T.
__device__ __forceinline__ void load_columns(FourRight& right, uint32_t tile, int d, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        load_matrices(right[i], tile + tile_byte(16 * i + lane % 8 + 8 * (lane / 16), 2 * d + lane / 8 % 2));
}
/// Of the tile's rows 16j .. 16j + 15 the columns 64d .. 64d + 63, for left tile.
__device__ __forceinline__ void load_rows(FourRight& right, uint32_t tile, int j, int d, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        load_matrices_transposed(
            right[i], tile + tile_byte(16 * j + lane % 8 + 8 * (lane / 8 % 2), 8 * d + 2 * i + lane / 16));
}

/// sum += left tile^T for a tile of 64 rows; columns 16d .. 16d + 15.
__device__ __forceinline__ void multiply_tile(float (&sum)[8][4], const uint32_t (&left)[4], uint32_t tile,
                                              int d, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t right[4];
        load_matrices(right, tile + tile_byte(16 * i + lane % 8 + 8 * (lane / 16), 2 * d + lane / 8 % 2));
        mma(sum[2 * i], left, right[0], right[1]);
        mma(sum[2 * i + 1], left, right[2], right[3]);
    }
}

/// sum += left M^T for a lower triangle M of 16 x 16 blocks.
__device__ __forceinline__ void multiply_triangle(float (&sum)[8][4], const uint32_t (&left)[4][4],
                                                  const uint4 (&blocks)[kTriangle]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = j; i < 4; ++i) {
            const uint4 right = blocks[i * (i + 1) / 2 + j];
            mma(sum[2 * i], left[j], right.x, right.y);
            mma(sum[2 * i + 1], left[j], right.z, right.w);
        }
    }
}

/// The same where left and M are sums of a high and a low matrix; the product of the low ones is left out.
__device__ __forceinline__ void multiply_triangle(float (&sum)[8][4], const uint32_t (&high)[4][4],
                                                  const uint32_t (&low)[4][4],
                                                  const uint4 (&blocks)[kTriangle],
                                                  const uint4 (&blocks_low)[kTriangle]) {
    multiply_triangle(sum, low, blocks);
    multiply_triangle(sum, high, blocks);
    multiply_triangle(sum, high, blocks_low);  // last: they were asked for last
}

/// One chunk of a state warp: S [16 v, 128 k] moves on by up to 64 rows. `solve` holds A, and becomes the next chunk's;
/// to ask for solve_low as early there are no registers.
__device__ __forceinline__ void advance_state(float (&s)[16][4], uint4 (&solve)[kTriangle],
                                              const Stage& stage, Passed& passed, const Record& record,
                                              const Record* next, int half, int lane) {
    const uint32_t k = shared_address(stage.k);
    uint4 solve_low[kTriangle];
    load_triangle(solve_low, record.solve_low, lane);
    float sum[8][4] = {};
    FourRight right[2];  // taking turns: the next products' are asked for before these
    load_columns(right[0], k, 0, lane);
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        if (d + 1 < kDim / 16) load_columns(right[(d + 1) % 2], k, d + 1, lane);
        uint32_t left[4], left_low[4];
        split_state(s, d, left, left_low);
        passed.state[d][lane] = make_uint4(left[0], left[1], left[2], left[3]);
        multiply_four(sum, 0, left, left_low, right[d % 2]);
    }
    uint32_t high[4][4], low[4][4];
    const uint32_t v = shared_address(stage.v);
    find_errors(
        high, low, sum, stage.factors,
        [&](int row, int part) { return v + slice_byte(row, 2 * half + part); }, lane);
    float u[8][4] = {};
    multiply_triangle(u, high, low, solve, solve_low);
    if (next != nullptr) load_triangle(solve, next->solve, lane);

    load_rows(right[0], k, 0, 0, lane);
    const float last = stage.factors[2 * kChunk];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][e] *= last;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t plain[4], scaled[4], scaled_low[4];
        split_update(u, j, stage.factors + kChunk, lane, plain, scaled, scaled_low);
        passed.u[j][lane] = make_uint4(plain[0], plain[1], plain[2], plain[3]);
#pragma unroll
        for (int d = 0; d < 2; ++d) {  // halves of the 128 columns
            const int next = 2 * j + d + 1;
            if (next < 8) load_rows(right[next % 2], k, next / 2, next % 2, lane);
            multiply_four(s, 8 * d, scaled, scaled_low, right[d]);
        }
    }
}

/// One chunk of an output warp: o [64 rows, 16 v]. `scores` holds P, and becomes the next chunk's.
__device__ __forceinline__ void find_output(uint4 (&scores)[kTriangle], const Stage& stage,
                                            const Passed& passed, const Record* next, bf16* to, int64_t ld,
                                            int rows, int lane) {
    const uint32_t q = shared_address(stage.q);
    float o[8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        const uint4 s = passed.state[d][lane];
        const uint32_t left[4] = {s.x, s.y, s.z, s.w};
        multiply_tile(o, left, q, d, lane);
    }
    uint32_t u[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 v = passed.u[i][lane];
        u[i][0] = v.x, u[i][1] = v.y, u[i][2] = v.z, u[i][3] = v.w;
    }
    scale_rows(o, stage.factors + 3 * kChunk, lane);
    multiply_triangle(o, u, scores);
    if (next != nullptr) load_triangle(scores, next->scores, lane);
    store_output(o, to, ld, rows, lane);
}

}  // namespace quern::cuda::delta
