// One row of a packed table, for ops that look up tokens. Values go to shared memory first: after a store to global memory the next
// load would wait, since as far as the compiler knows it may read what was stored.
#pragma once

#include "ggml-like/cuda/pack/decode.cuh"

namespace quern::cuda::pack {

using namespace ptx;

struct Table {
    Part part;
    int chunks, columns;
};

/// Where a packed chunk of BF16 has element (row of the tile, column of the chunk).
__device__ __forceinline__ int place_of_bf16(int row, int column) {
    const int g = row & 7, upper = row >> 3, kk = column / 16, j = column % 16;
    const int t = j % 8 / 2, p = j / 8, i = j % 2, lane = 4 * g + t;
    return 512 * kk + 16 * lane + 4 * (2 * p + upper) + 2 * i;
}

/// That element of a packed chunk in FP8 or NVFP4, without factors.
__device__ __forceinline__ float element(Kind kind, const uint8_t* chunk, int row, int column) {
    const int g = row & 7, upper = row >> 3, kk = column / 16, j = column % 16;
    const int t = j % 8 / 2, p = j / 8, i = j % 2, lane = 4 * g + t;
    if (kind == Kind::fp8) {
        const uint32_t code = chunk[512 * (kk / 2) + 16 * lane + 8 * (kk % 2) + 4 * upper + 2 * i + p];
        const float scale = reinterpret_cast<const float*>(chunk + 1024)[upper];
        return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * scale;
    }
    const uint32_t half = reinterpret_cast<const uint16_t*>(chunk + 16 * lane + 4 * (kk / 2 * 2 + upper))[i];
    const uint32_t code = nvfp4_code(half, kk % 2, p);
    float scale[4];
    decode_scales(*reinterpret_cast<const uint32_t*>(chunk + 512 + 8 * g + 4 * upper), scale);
    return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p60f * scale[kk];
}

/// Whole block of kBlock threads: the row of a token into `values`, each thread the columns threadIdx.x + kBlock i. An id outside the table
/// is clamped.
template <int kBlock>
__device__ __forceinline__ void load_embedding(const Table& t, int given, float* values) {
    const Part& table = t.part;
    const int id = min(max(given, 0), table.rows - 1), row = id % kTileRows;
    const uint8_t* tile =
        table.data + static_cast<int64_t>(id / kTileRows) * t.chunks * chunk_bytes(table.kind);
    // factors carry the lift of the few-row kernels: codes here are too small by it as well
    const float factor = table.factor[id] * (table.kind == Kind::fp8 ? 0x1p60f : 1.0f);
    const int own = static_cast<int>(threadIdx.x), column = own % kChunkCols;
    const int step = kBlock / kChunkCols * chunk_bytes(table.kind);
    const uint8_t* from = tile + own / kChunkCols * chunk_bytes(table.kind);
    if (table.kind == Kind::bf16) {
        from += place_of_bf16(row, column);
#pragma unroll 8
        for (int k = own; k < t.columns; k += kBlock, from += step)
            values[k] = __bfloat162float(*reinterpret_cast<const bf16*>(from)) * factor;
    } else {
#pragma unroll 1
        for (int k = own; k < t.columns; k += kBlock, from += step)
            values[k] = element(table.kind, from, row, column) * factor;
    }
}

}  // namespace quern::cuda::pack
