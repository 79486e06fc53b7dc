// What the two kernels of the chunked gated delta rule share. Formulas and letters: prefill.cu.
#pragma once

#include "ggml-like/cuda/delta/chunks.h"
#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kDim = 128;
constexpr int kChunk = kDeltaChunk;
/// Blocks of 16 x 16 on and below the diagonal of 64 x 64; block (i, j) is number i (i + 1) / 2 + j.
constexpr int kTriangle = 10;
constexpr int kTileBytes = kChunk * kDim * 2;

/// What prepare leaves for scan, one for each chunk and value head. A block of A or P lies as the right operand of mma
/// wants it: lane l's four registers are element l.
struct Record {
    uint4 solve[kTriangle][32];      // A, rounded to BF16
    uint4 solve_low[kTriangle][32];  // what the rounding left of it
    uint4 scores[kTriangle][32];     // P
    float error[kChunk];             // exp(G) n
    float write[kChunk];             // exp(G_last - G) n
    float last[kChunk];              // [0] is exp(G_last)
    float read[kChunk];              // exp(G) m
};
static_assert(sizeof(Record) == kDeltaRecordBytes);

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

/// The launches. `chunks`: the chunks of the step, or more.
void launch_prepare(Context& context, const DeltaStep& p, int64_t chunks);
void launch_scan(Context& context, const DeltaStep& p);

}  // namespace quern::cuda::delta
