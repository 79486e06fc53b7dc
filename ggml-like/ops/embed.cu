// embed on the GPU: a block a row, read from the packed table. Traffic: one row of the table a token. Bound: latency; so values go
// to shared memory first: after a store to y the next load would wait, since as far as the compiler knows it may read what was stored.
#include "ggml-like/ops/embed.h"

#include "ggml-like/cuda/launch_after_all.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/pack/decode.cuh"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

constexpr int kBlock = 256;

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

/// kPrompt: squares are one number a row, else of 16 columns each. `source`, `images`, `later`: of OtherRows, or null; `later`: its ids.
template <bool kPrompt>
__global__ void __launch_bounds__(kBlock)
    embed_kernel(Part table, int chunks, int columns, const int* ids, const int* source, const float* images,
                 const int* later, float* y, Defer defer) {
    extern __shared__ float4 memory[];
    float *norm = reinterpret_cast<float*>(memory), *values = norm + columns;
    allow_successor();
#pragma unroll 1
    for (int k = 4 * static_cast<int>(threadIdx.x); k < columns; k += 4 * kBlock)
        copy_async16(norm + k, defer.norm + k);
    commit_copies();
    wait_for_predecessor();
    const int n = blockIdx.x, other = source != nullptr ? __ldcg(source + n) : -1;
    const int given = __ldcg(later != nullptr && other >= 0 ? later + other : ids + n);
    const int id = min(max(given, 0), table.rows - 1), row = id % kTileRows;
    const uint8_t* tile =
        table.data + static_cast<int64_t>(id / kTileRows) * chunks * chunk_bytes(table.kind);
    // factors carry the lift of the few-row kernels: codes here are too small by it as well
    const float factor = table.factor[id] * (table.kind == Kind::fp8 ? 0x1p60f : 1.0f);
    const int64_t image = images != nullptr ? other : -1;
    const int own = static_cast<int>(threadIdx.x), column = own % kChunkCols;
    const int step = kBlock / kChunkCols * chunk_bytes(table.kind);
    const uint8_t* from = tile + own / kChunkCols * chunk_bytes(table.kind);
    if (image >= 0) {
#pragma unroll 4
        for (int k = own; k < columns; k += kBlock) values[k] = images[image * columns + k];
    } else if (table.kind == Kind::bf16) {
        from += place_of_bf16(row, column);
#pragma unroll 8
        for (int k = own; k < columns; k += kBlock, from += step)
            values[k] = __bfloat162float(*reinterpret_cast<const bf16*>(from)) * factor;
    } else {
#pragma unroll 1
        for (int k = own; k < columns; k += kBlock, from += step)
            values[k] = element(table.kind, from, row, column) * factor;
    }
    wait_copies<0>();
    __syncthreads();
    float squares = 0;
#pragma unroll 1
    for (int k = own; k < columns; k += kBlock) {
        const float x = values[k];
        y[static_cast<int64_t>(n) * columns + k] = x;
        if constexpr (kPrompt) {
            defer.h[static_cast<int64_t>(n) * columns + k] = __float2bfloat16(x * norm[k]);
            squares += x * x;
        } else {
            defer_column(defer, n, k, x, norm[k]);
        }
    }
    if constexpr (kPrompt) write_squares<kBlock>(defer, n, squares);
}

}  // namespace

void embed(const Node& node, Context& c) {
    const auto& p = node.params<EmbedParams>();
    const Packed& table = *static_cast<const Packed*>(p.table->placed);
    const Tensor& y = *node.outputs[0];
    const Tensor* others = node.inputs.size() > 2 ? node.inputs[3] : nullptr;
    const bool images = others != nullptr && others->dtype == DType::F32;
    const auto kernel = p.kind == StepKind::prompt ? embed_kernel<true> : embed_kernel<false>;
    if (table.cols % 4 != 0) unsupported("embed", "a width that is not a multiple of 4");
    const int shared = 2 * static_cast<int>(table.cols * sizeof(float));
    const auto start = [&](auto launch_kernel) {
        launch_kernel(c, "embed", kernel, static_cast<unsigned>(y.shape[0]), kBlock, shared, table.part[0],
                      table.chunks, table.cols, node.inputs[0]->as<int>(),
                      others != nullptr ? node.inputs[2]->as<const int>() : nullptr,
                      images ? others->as<const float>() : nullptr,
                      others != nullptr && !images ? others->as<const int>() : nullptr, y.as<float>(),
                      defer_of(*node.inputs[1], *node.outputs[1], *node.outputs[2]));
    };
    if (p.after_all)
        start([](auto&&... a) { launch_after_all(a...); });
    else
        start([](auto&&... a) { launch(a...); });
}

}  // namespace quern::cuda
