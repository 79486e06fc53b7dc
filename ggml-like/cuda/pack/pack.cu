// Packing at load: checkpoint rows become packed chunks (packed.h), many matrices' rows in one launch.
//
//   thread = one row of one chunk of 64 columns; a task's threads are numbered row by row, and a table in memory gives
//   each block of 256 threads its task
//
// No shared memory. Traffic: raw bytes once, packed bytes once. Bound: the copies to the device, behind which it hides:
// 22.44 GB load in 0.6 to 0.7 s, 31 to 35 GB/s (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/pack/decode.cuh"
#include "ggml-like/cuda/pack/pack.h"

namespace quern::cuda::pack {

using namespace ptx;

namespace {

constexpr int kBlock = 256;

/// Where a row goes.
struct Target {
    int64_t tile;
    int row;  // 0..15
};

__device__ __forceinline__ Target target(const RawRows& raw, int64_t r) {
    const int64_t own = raw.row0 + r;
    if (raw.paired) return {own / 8, static_cast<int>(own % 8) + 8 * raw.half};
    const int64_t place = raw.place + own;
    return {place / kTileRows, static_cast<int>(place % kTileRows)};
}

__device__ __forceinline__ bf16 dense_value(const RawRows& raw, int64_t at) {
    if (raw.type == RawType::bf16) return static_cast<const bf16*>(raw.values)[at];
    if (raw.type == RawType::f32) return __float2bfloat16(static_cast<const float*>(raw.values)[at]);
    const unsigned short bits = static_cast<const unsigned short*>(raw.values)[at];
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return __float2bfloat16(f);
}

/// Of a block of 16 columns, lane t has pair p = 0: 2t, 2t + 1 (registers a0, a1), and p = 1: 2t + 8, 2t + 9 (a2, a3).
__device__ void pack_dense(const RawRows& raw, int64_t r, int64_t column, uint8_t* chunk, int row) {
    const int g = row & 7, upper = row >> 3;
    for (int kk = 0; kk < 4; ++kk)
        for (int t = 0; t < 4; ++t)
            for (int p = 0; p < 2; ++p)
                for (int i = 0; i < 2; ++i) {
                    const int64_t c = column + 16 * kk + 2 * t + 8 * p + i;
                    if (c >= raw.columns) continue;
                    bf16* to =
                        reinterpret_cast<bf16*>(chunk + 512 * kk + 16 * (4 * g + t) + 4 * (2 * p + upper));
                    to[i] = dense_value(raw, r * raw.columns + c);
                }
}

__device__ void pack_fp8(const RawRows& raw, int64_t r, int64_t column, uint8_t* chunk, int row) {
    const int g = row & 7, upper = row >> 3;
    const uint8_t* from = static_cast<const uint8_t*>(raw.values) + r * raw.columns;
    for (int kk = 0; kk < 4; ++kk)
        for (int t = 0; t < 4; ++t) {
            // word `upper` of the block
            uint8_t* to = chunk + 512 * (kk / 2) + 16 * (4 * g + t) + 8 * (kk % 2) + 4 * upper;
            for (int p = 0; p < 2; ++p)
                for (int i = 0; i < 2; ++i) {
                    const int64_t c = column + 16 * kk + 2 * t + 8 * p + i;
                    if (c < raw.columns) to[2 * i + p] = from[c];
                }
        }
    float scale = 1.0f;
    if (raw.scale_blocks)
        scale = raw.scale[(raw.row0 + r) / 128 * ((raw.columns + 127) / 128) + column / 128];
    if (row % 8 == 0 || raw.row0 + r == 0) reinterpret_cast<float*>(chunk + 1024)[upper] = scale;
}

__device__ void pack_nvfp4(const RawRows& raw, int64_t r, int64_t column, uint8_t* chunk, int row) {
    const int g = row & 7, upper = row >> 3;
    const uint8_t* from = static_cast<const uint8_t*>(raw.values) + r * (raw.columns / 2);
    uint8_t scale[4] = {};
    for (int kk = 0; kk < 4; ++kk)
        if (const int64_t c = column + 16 * kk; c < raw.columns)
            scale[kk] = raw.nvfp4_scale[r * (raw.columns / 16) + c / 16];
    const auto code = [&](int64_t c) -> uint32_t {
        if (c >= raw.columns || scale[(c - column) / 16] == 0) return 0;
        return (from[c / 2] >> (4 * (c & 1))) & 15u;
    };
    for (int j = 0; j < 2; ++j)
        for (int t = 0; t < 4; ++t) {
            uint32_t word = 0;
            for (int odd = 0; odd < 2; ++odd)
                for (int p = 0; p < 2; ++p)
                    for (int i = 0; i < 2; ++i)
                        word |= nvfp4_place(code(column + 32 * j + 16 * odd + 2 * t + 8 * p + i), odd, p)
                                << (16 * i);
            reinterpret_cast<uint32_t*>(chunk + 16 * (4 * g + t))[2 * j + upper] = word;
        }
    for (int kk = 0; kk < 4; ++kk) chunk[512 + 8 * g + 4 * upper + kk] = scale[kk];
}

__global__ void __launch_bounds__(kBlock) pack_kernel(const PackTask* tasks, const int* task_of) {
    const PackTask& task = tasks[task_of[blockIdx.x]];
    const RawRows raw = task.raw;
    uint8_t* data = task.data;
    float* factor = task.factor;
    const int chunks = task.chunks;
    const int64_t i = static_cast<int64_t>(blockIdx.x - task.first_block) * kBlock + threadIdx.x;
    const int64_t r = i / chunks;
    const int c = static_cast<int>(i % chunks);
    if (r >= raw.rows) return;
    const Target to = target(raw, r);
    const Kind kind = raw.type == RawType::fp8     ? Kind::fp8
                      : raw.type == RawType::nvfp4 ? Kind::nvfp4
                                                   : Kind::bf16;
    uint8_t* chunk = data + (to.tile * chunks + c) * chunk_bytes(kind);
    const int64_t column = static_cast<int64_t>(c) * kChunkCols;
    if (kind == Kind::bf16) pack_dense(raw, r, column, chunk, to.row);
    if (kind == Kind::fp8) pack_fp8(raw, r, column, chunk, to.row);
    if (kind == Kind::nvfp4) pack_nvfp4(raw, r, column, chunk, to.row);
    if (c != 0) return;
    float f = raw.global_scale;
    if (raw.type == RawType::fp8 && raw.scale != nullptr && !raw.scale_blocks) f *= raw.scale[r];
    const float lift = kind == Kind::bf16  ? kSumLift<Kind::bf16>
                       : kind == Kind::fp8 ? kSumLift<Kind::fp8>
                                           : kSumLift<Kind::nvfp4>;
    factor[to.tile * kTileRows + to.row] = f * lift;
}

__host__ __device__ __forceinline__ uint32_t mix(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return static_cast<uint32_t>(x);
}

/// Two values of about N(0, deviation), from sums of four uniform bytes.
__device__ __forceinline__ uint32_t random_pair(uint32_t a, uint32_t b, float deviation) {
    const auto value = [&](uint32_t v) {
        const float sum =
            static_cast<float>((v & 255) + (v >> 8 & 255) + (v >> 16 & 255) + (v >> 24)) - 510.0f;
        return sum * (deviation / 147.8f);
    };
    return pack_bf16(value(a), value(b));
}

/// Random weights; a thread has a word of 4 bytes of the packed form.
__global__ void __launch_bounds__(kBlock)
    random_kernel(Kind kind, uint32_t* data, float* factor, int64_t words, int64_t rows, float deviation,
                  uint64_t seed) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
    const int per_chunk = chunk_bytes(kind) / 4;
    if (i < rows) {
        const float code = kind == Kind::bf16  ? 1.0f
                           : kind == Kind::fp8 ? deviation / 100.0f * kSumLift<Kind::fp8>
                                               : deviation / 2.5f * kSumLift<Kind::nvfp4>;
        factor[i] = code;
    }
    if (i >= words) return;
    const uint32_t a = mix(seed + 2 * static_cast<uint64_t>(i)),
                   b = mix(seed + 2 * static_cast<uint64_t>(i) + 1);
    const int place = static_cast<int>(i % per_chunk);
    if (kind == Kind::bf16) {
        data[i] = random_pair(a, b, deviation);
    } else if (kind == Kind::fp8) {
        // Exponents of up to 13, so no NaN; the chunk's scales are 1.
        data[i] = place == 256 || place == 257 ? 0x3f800000u : place > 257 ? 0u : a & 0xefefefefu;
    } else {
        // Scales around 1: exponent 6 or 7, any mantissa.
        data[i] = place >= 128 ? 0x30303030u | (a & 0x0f0f0f0fu) : a;
    }
}

unsigned blocks(int64_t threads) { return static_cast<unsigned>((threads + kBlock - 1) / kBlock); }

}  // namespace

int pack_blocks(const RawRows& raw, int chunks) { return static_cast<int>(blocks(raw.rows * chunks)); }

void pack_rows(cudaStream_t stream, const PackTask* tasks, const int* task_of, int blocks) {
    pack_kernel<<<blocks, kBlock, 0, stream>>>(tasks, task_of);
    check_launch(cudaGetLastError(), "pack");
}

void fill_random(cudaStream_t stream, Kind kind, uint8_t* data, float* factor, int64_t tiles, int chunks,
                 float deviation, uint64_t seed) {
    const int64_t words = tiles * chunks * chunk_bytes(kind) / 4, rows = tiles * kTileRows;
    random_kernel<<<blocks(words > rows ? words : rows), kBlock, 0, stream>>>(
        kind, reinterpret_cast<uint32_t*>(data), factor, words, rows, deviation, mix(seed) * 0x100000000ull);
    check_launch(cudaGetLastError(), "fill_random");
}

}  // namespace quern::cuda::pack
