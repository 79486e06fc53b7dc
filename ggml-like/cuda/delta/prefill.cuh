// What the kernels of the chunked gated delta rule share. Formulas and letters: prefill.cu.
#pragma once

#include "ggml-like/cuda/delta/chunks.h"
#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kDim = 128;
constexpr int kChunk = kDeltaChunk;
/// Blocks of 16 x 16 on and below the diagonal of 64 x 64.
constexpr int kTriangle = 10;
constexpr int kTileBytes = kChunk * kDim * 2;

/// A lower triangle of 64 x 64 BF16 numbers as 8 x 8 matrices of 128 bytes, two of which lie side by side in a block:
///
///     blocks of column 0   matrices  0  1 | 2  3 | ... | 14 15      rows 0 .. 7, 8 .. 15, ... 56 .. 63
///     of column 1                   16 17 | ...       | 26 27      rows 16 .. 23, ... 56 .. 63
///     of column 2, of column 3      28 .. 35, 36 .. 39
///
/// Word l of a matrix is the register of lane l of a right operand of mma; products of warpgroups call it a core matrix.
using Triangle = uint32_t[4 * kTriangle][32];
/// Where the blocks of column j begin, in matrices.
__device__ __forceinline__ constexpr int first_matrix(int j) { return 2 * j * (9 - j); }
/// Of block (i, j), the matrix in its upper left corner; to its right + 1, below + 2.
__device__ __forceinline__ constexpr int matrix_of(int i, int j) { return first_matrix(j) + 4 * (i - j); }

/// What prepare leaves for scan, one for each chunk and value head.
struct Record {
    Triangle solve;       // A, rounded to BF16
    Triangle solve_low;   // what the rounding left of it
    float error[kChunk];  // exp(G) n
    float write[kChunk];  // exp(G_last - G) n
    float last[kChunk];   // [0] is exp(G_last)
    Triangle scores;      // P
    float read[kChunk];   // exp(G) m
};
static_assert(sizeof(Record) == kDeltaRecordBytes);

/// Block (i, j) of a triangle, as the lane's registers of a right operand of 16 x 16.
__device__ __forceinline__ void store_block(Triangle& to, int i, int j, int lane, const uint32_t (&r)[4]) {
#pragma unroll
    for (int m = 0; m < 4; ++m) to[matrix_of(i, j) + m][lane] = r[m];
}

__device__ __forceinline__ int chunks_of(const int* start, int sequence) {
    return (start[sequence + 1] - start[sequence] + kChunk - 1) / kChunk;
}

/// The byte of 16-byte part `part` of a row in a tile of 256-byte rows; the swizzle spreads 8 rows over all banks.
__device__ __forceinline__ int tile_byte(int row, int part) { return row * 256 + ((part ^ (row & 7)) << 4); }
/// The same for rows of 64 bytes.
__device__ __forceinline__ int slice_byte(int row, int part) {
    return row * 64 + ((part ^ ((row >> 1) & 3)) << 4);
}

__device__ __forceinline__ float2 unpack(uint32_t two) {
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}

/// Transposes an 8 x 8 matrix of BF16, of which each lane holds two elements.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/// Each of two numbers as the sum of a high and a low BF16 number.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    high = pack_bf16(x, y);
    const float2 h = unpack(high);
    low = pack_bf16(x - h.x, y - h.y);
}

/// What `prepare` tells of a chunk of the step and a key head.
__device__ __forceinline__ int* told_of(const DeltaStep& p, int chunk, int key_head) {
    return p.told + kToldChunks + chunk * p.key_heads + key_head;
}

/// Blocks of the scan by products of warpgroups: of kScanColumns columns of v each.
constexpr int kScanColumns = 64;
inline int64_t scan_blocks(const DeltaStep& p) {
    return int64_t{p.value_heads} * (kDim / kScanColumns) * p.sequences;
}

/// The launches. `chunks`: the chunks of the step, or more. `told`, which launch_prepare returns: whether counts say of each chunk and key
/// head that it is there. The scan by products of warpgroups then begins beside the rest of `prepare`.
bool launch_prepare(Context& context, const DeltaStep& p, int64_t chunks);
void launch_scan(Context& context, const DeltaStep& p);
void launch_scan_warpgroups(Context& context, const DeltaStep& p, bool told);

}  // namespace quern::cuda::delta
