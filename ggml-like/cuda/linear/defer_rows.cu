// The split norm of many rows (epilogue.cuh): a block a row. Traffic: x once, h once.
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::linear {

using namespace ptx;

namespace {

constexpr int kNormThreads = 512;

__global__ void __launch_bounds__(kNormThreads) defer_kernel(const float* x, Defer d) {
    allow_successor();
    wait_for_predecessor();
    const int64_t at = static_cast<int64_t>(blockIdx.x) * d.columns;
    float sum = 0;
    for (int k = threadIdx.x * 4; k < d.columns; k += kNormThreads * 4) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(x + at + k));
        const float4 n = *reinterpret_cast<const float4*>(d.norm + k);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        *reinterpret_cast<uint2*>(d.h + at + k) =
            make_uint2(pack_bf16(v.x * n.x, v.y * n.y), pack_bf16(v.z * n.z, v.w * n.w));
    }
    write_squares<kNormThreads>(d, blockIdx.x, sum);
}

}  // namespace

Defer defer_of(const Tensor& norm, const Tensor& h, const Tensor& squares) {
    const int columns = static_cast<int>(h.shape[1]);
    if (columns % kSquareColumns != 0) unsupported("residual", "a width that is not a multiple of 16");
    return {norm.as<float>(), h.as<bf16>(), squares.as<float>(), columns, static_cast<int>(squares.shape[1])};
}

RowScale scale_of(const Tensor& h, const Tensor& squares, float eps) {
    return {squares.as<float>(), static_cast<int>(squares.shape[1]), 1.0f / static_cast<float>(h.shape[1]),
            eps};
}

void defer_rows(Context& c, const float* x, const Defer& defer, int rows) {
    launch(c, "defer_rows", defer_kernel, rows, kNormThreads, 0, x, defer);
}

}  // namespace quern::cuda::linear
