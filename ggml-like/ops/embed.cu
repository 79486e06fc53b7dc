// embed on the GPU: a block a row, read from the packed table. Traffic: one row of the table a token. Bound: latency.
#include "ggml-like/ops/embed.h"

#include "ggml-like/cuda/launch_after_all.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/pack/embedding.cuh"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

constexpr int kBlock = 256;

/// kPrompt: squares are one number a row, else of 16 columns each. `source`, `images`, `later`: of OtherRows, or null; `later`: its ids.
template <bool kPrompt>
__global__ void __launch_bounds__(kBlock)
    embed_kernel(Table table, const int* ids, const int* source, const float* images, const int* later,
                 float* y, Defer defer) {
    extern __shared__ float4 memory[];
    const int columns = table.columns;
    float *norm = reinterpret_cast<float*>(memory), *values = norm + columns;
    allow_successor();
#pragma unroll 1
    for (int k = 4 * static_cast<int>(threadIdx.x); k < columns; k += 4 * kBlock)
        copy_async16(norm + k, defer.norm + k);
    commit_copies();
    bring_near(ids), bring_near(y), bring_near(defer.columns);
    wait_for_predecessor();
    const int n = blockIdx.x, other = source != nullptr ? __ldcg(source + n) : -1;
    const int given = __ldcg(later != nullptr && other >= 0 ? later + other : ids + n);
    const int64_t image = images != nullptr ? other : -1;
    const int own = static_cast<int>(threadIdx.x);
    if (image >= 0) {
#pragma unroll 4
        for (int k = own; k < columns; k += kBlock) values[k] = images[image * columns + k];
    } else {
        load_embedding<kBlock>(table, given, values);
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
        launch_kernel(c, "embed", kernel, static_cast<unsigned>(y.shape[0]), kBlock, shared,
                      Table{table.part[0], table.chunks, static_cast<int>(table.cols)},
                      node.inputs[0]->as<int>(),
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
