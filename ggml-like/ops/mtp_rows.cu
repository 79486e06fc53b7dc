// mtp_rows on the GPU: two blocks a row, one for each half. Traffic: a row of the table and one of the hidden states a token. Bound:
// latency.
#include "ggml-like/ops/mtp_rows.h"

#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch_after_all.cuh"
#include "ggml-like/cuda/pack/embedding.cuh"

namespace quern::cuda {

using namespace ptx;
using namespace pack;

namespace {

constexpr int kBlock = 256, kWarps = kBlock / 32;

struct MtpInputs {
    Table table;
    const int *ids, *rows, *source;  // rows, source, images: or null
    const float *images, *hidden;
    int hidden_rows;
    const float *embedding_norm, *last_norm, *hidden_norm;
    float eps;
    bf16* y;
};

/// All threads get both sums of the block.
__device__ float2 sum_of_block(float a, float b) {
    __shared__ float2 sums[kWarps];
    a = warp_sum(a), b = warp_sum(b);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = {a, b};
    __syncthreads();
    float2 all{0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all.x += sums[w].x, all.y += sums[w].y;
    return all;
}

__global__ void __launch_bounds__(kBlock) mtp_rows_kernel(MtpInputs in) {
    extern __shared__ float4 memory[];
    const int columns = in.table.columns, own = static_cast<int>(threadIdx.x);
    float *values = reinterpret_cast<float*>(memory), *first = values + columns, *second = first + columns;
    const bool embeds = blockIdx.y == 0;
    allow_successor();
#pragma unroll 1
    for (int k = 4 * own; k < columns; k += 4 * kBlock) {
        copy_async16(first + k, (embeds ? in.embedding_norm : in.last_norm) + k);
        if (!embeds) copy_async16(second + k, in.hidden_norm + k);
    }
    commit_copies();
    bring_near(in.hidden_rows), bring_near(in.y);
    wait_for_predecessor();
    const int t = blockIdx.x;
    if (embeds) {
        const int64_t image = in.source != nullptr ? __ldcg(in.source + t) : -1;
        if (image < 0) load_embedding<kBlock>(in.table, __ldcg(in.ids + t), values);
#pragma unroll 4
        for (int k = own; image >= 0 && k < columns; k += kBlock) values[k] = in.images[image * columns + k];
    } else {
        const int from = in.rows == nullptr ? t : min(max(__ldcg(in.rows + t), 0), in.hidden_rows - 1);
        const float* x = in.hidden + static_cast<int64_t>(from) * columns;
#pragma unroll 8
        for (int k = own; k < columns; k += kBlock) values[k] = __ldcg(x + k);
    }
    wait_copies<0>();
    __syncthreads();
    float squares = 0, weighted = 0;
#pragma unroll 8
    for (int k = own; k < columns; k += kBlock) {
        const float v = values[k], u = v * first[k];
        squares += v * v;
        weighted += u * u;
    }
    const float2 sums = sum_of_block(squares, weighted);
    const float one = rsqrtf(sums.x / columns + in.eps);
    const float factor = embeds ? one : one * rsqrtf(sums.y * one * one / columns + in.eps);
    bf16* y = in.y + (2 * static_cast<int64_t>(t) + (embeds ? 0 : 1)) * columns;
#pragma unroll 8
    for (int k = own; k < columns; k += kBlock)
        y[k] = __float2bfloat16(values[k] * factor * first[k] * (embeds ? 1.0f : second[k]));
}

}  // namespace

void mtp_rows(const Node& node, Context& c) {
    const auto& p = node.params<MtpRowsParams>();
    const Tensor &hidden = *node.inputs[1], &y = *node.outputs[0];
    const Packed& table = *static_cast<const Packed*>(p.table->placed);
    if (y.dtype != DType::BF16) unsupported("mtp_rows", "activations other than BF16");
    if (table.cols % 4 != 0) unsupported("mtp_rows", "a width that is not a multiple of 4");
    size_t next = 5;
    const auto optional = [&](bool there) { return there ? node.inputs[next++] : nullptr; };
    const Tensor *rows = optional(p.chosen), *source = optional(p.images), *images = optional(p.images);
    const auto norm = [&](size_t i) { return node.inputs[2 + i]->as<const float>(); };
    const MtpInputs in{{table.part[0], table.chunks, static_cast<int>(table.cols)},
                       node.inputs[0]->as<const int>(),
                       rows != nullptr ? rows->as<const int>() : nullptr,
                       source != nullptr ? source->as<const int>() : nullptr,
                       images != nullptr ? images->as<const float>() : nullptr,
                       hidden.as<const float>(),
                       static_cast<int>(hidden.shape[0]),
                       norm(0),
                       norm(1),
                       norm(2),
                       p.eps,
                       y.as<bf16>()};
    const dim3 grid(static_cast<unsigned>(y.shape[0]), 2);
    const int shared = 3 * static_cast<int>(table.cols * sizeof(float));
    if (p.after_all)
        launch_after_all(c, "mtp_rows", mtp_rows_kernel, grid, kBlock, shared, in);
    else
        launch(c, "mtp_rows", mtp_rows_kernel, grid, kBlock, shared, in);
}

}  // namespace quern::cuda
